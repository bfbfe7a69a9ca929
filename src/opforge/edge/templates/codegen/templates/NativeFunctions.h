// ${generated_comment}; the kernels that registration calls.
#pragma once

${headers}

${nativeFunctions_declarations}
