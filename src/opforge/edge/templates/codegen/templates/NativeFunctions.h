// ${generated_comment}; the kernels that registration calls.
#pragma once

#include <tuple>

${headers}

${nativeFunctions_declarations}
