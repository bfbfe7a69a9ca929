// ${generated_comment}; kernels register themselves when the library is loaded, so nothing is declared here.
#pragma once
