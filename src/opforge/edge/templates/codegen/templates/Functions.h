// ${generated_comment}; operators as functions, for C++ that calls them.
#pragma once

#ifndef TORCH_API
#define TORCH_API
#endif

${static_dispatch_extra_headers}

${Functions_declarations}
