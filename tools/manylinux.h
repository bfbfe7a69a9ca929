// Included before the sources of a prebuilt library, so that it loads where torch's own wheels do (manylinux_2_28).
// It defines what newer compilers take from newer system libraries: glibc after 2.28, libstdc++ after GCC 8.
#pragma once
#include <sys/single_threaded.h>

#include <new>
#include <sstream>

extern "C" {
char __libc_single_threaded __attribute__((visibility("hidden"))) = 0;  // 0: there may be other threads
}

namespace std {
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std

template std::basic_ostringstream<char>::basic_ostringstream();
template std::string std::basic_stringbuf<char>::str() const&;
template std::string std::basic_stringbuf<char>::str() &&;

// glibc 2.34 moved these functions into libc.so.6 under a new version. The old versions are in every glibc.
#if defined(__x86_64__)
#define OPFORGE_OLD_GLIBC "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define OPFORGE_OLD_GLIBC "GLIBC_2.17"
#else
#error "prebuilt libraries are for x86_64 and aarch64"
#endif
__asm__(".symver dlopen, dlopen@" OPFORGE_OLD_GLIBC);
__asm__(".symver dlsym, dlsym@" OPFORGE_OLD_GLIBC);
__asm__(".symver dlerror, dlerror@" OPFORGE_OLD_GLIBC);
