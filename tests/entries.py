"""The entries of OpInfo that quick tests record: every kind of operator, and all that the examples and the docs name."""

ENTRIES = (
    # pointwise: unary, binary, ternary, comparisons, bits, complex
    "abs", "asin", "add", "sub", "mul", "div_no_rounding_mode", "exp", "frac", "square", "neg", "sigmoid", "tanh", "clamp",
    "isinf", "nan_to_num", "where", "maximum", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or",
    "logical_xor", "bitwise_and", "bitwise_not", "complex", "nn_functional_relu", "nn_functional_silu",
    "nn_functional_gelu", "masked_fill",
    # reductions, scans, searching and sorting
    "sum", "mean", "var", "all", "any", "argmax", "max_reduction_with_dim", "cumsum", "sort", "topk",
    # products, linear algebra, transforms
    "mm", "bmm", "addmm", "matmul", "nn_functional_linear", "linalg_qr", "linalg_solve_ex", "fft_rfft",
    # networks
    "softmax", "_softmax_backward_data", "native_layer_norm", "nn_functional_layer_norm", "nn_functional_batch_norm",
    "nn_functional_conv2d", "nn_functional_max_pool2d", "nn_functional_embedding", "nn_functional_pad_reflect",
    "nn_functional_interpolate_bilinear", "nn_functional_nll_loss", "nn_functional_dropout",
    # indexing, shapes, copies, creation, random numbers
    "gather", "index_select", "index_put", "scatter_add", "masked_select", "nonzero", "flip", "tril", "cat", "split",
    "unbind", "view", "expand", "clone", "contiguous", "full_like", "randn_like", "bernoulli", "item",
    # what cannot be a case
    "to_sparse", "jiterator_unary",
)  # fmt: skip
