"""Install kernels in place of ATen's in a running process, for the calls they are proven for.

ATen's own kernels answer the other calls. The package needs only torch and imports nothing else of
opforge: `opforge pack` copies these files unchanged.
"""

RUNTIME_VERSION = 5
"""Version number. Packages with the same number share the runtime in a process."""
