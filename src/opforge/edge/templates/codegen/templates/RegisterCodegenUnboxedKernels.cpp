// ${generated_comment}; kernels are entered into the runtime's table when the library is loaded.
#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/core/event_tracer_hooks.h>
#include <executorch/runtime/core/exec_aten/exec_aten.h>
#include <executorch/runtime/core/span.h>
#include <executorch/runtime/kernel/kernel_includes.h>
#include <executorch/runtime/kernel/operator_registry.h>
#include <executorch/runtime/platform/profiler.h>

#include "${fn_header}"

namespace {

using namespace torch::executor;
namespace internal = ::executorch::runtime::internal;
using ::executorch::runtime::EValue;
using ::executorch::runtime::Kernel;
using ::executorch::runtime::Span;

const Kernel kernels[] = {
    ${unboxed_kernels}
};

const ::executorch::runtime::Error registered =
    ::executorch::runtime::register_kernels(Span<const Kernel>(kernels, sizeof(kernels) / sizeof(kernels[0])));

}  // namespace
