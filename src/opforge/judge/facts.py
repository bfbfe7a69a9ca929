"""Facts about single operators that judging needs: one record per packet, all listed here.

A packet is an operator's name without overload; its record holds for all its forms. Undefined
contents and solvers are in `opforge.ops.undefined`, because packages below this one need them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from opforge.judge.compare.properties import pooling as pool_checks
from opforge.judge.compare.properties import qr_lu, spectral, ties, unique
from opforge.judge.compare.properties.property_check import PropertyCheck
from opforge.judge.random import rules
from opforge.judge.roofline.formulas import (
    Formula,
    batch_norm,
    class_loss,
    class_loss_backward,
    diagonal_elements,
    embedding_backward,
    fetched_along,
    fetched_places,
    fetched_rows,
    full_copy,
    fused_step,
    gather,
    masked_scatter,
    norm_backward,
    normalisation,
    part_replacement,
    partial_copy,
    pointwise,
    pooling,
    reduction,
    resampling,
    scatter,
    strided_copy,
    triangular,
)
from opforge.judge.roofline.matrix_formulas import convolution, convolution_backward, linear_backward, product
from opforge.ops import Operator


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorFacts:
    """What judging must know about an operator beyond its schema and its tags."""

    property_check: PropertyCheck | None = None
    """Check for results that may differ from ATen's: ties, signs, order."""
    zero_signs: bool | None = None
    """True: zeros have ATen's signs, since elements only move. False: both zeros are right.

    False is for operators defined by comparisons: ATen's own sign differs between loops or formulas.
    None: elementwise operators on real numbers have ATen's signs, others do not.
    """
    nan_is_uninitialised: bool = False
    """ATen leaves part of a result uninitialised and never gives NaN elsewhere in it."""
    layout_is_input: bool = False
    """The answer is about memory and not about elements: it changes with the layout."""
    checks_indices: bool = False
    """Raises on a CPU for indices out of range, or counts negative ones from the end."""
    undeclared_writes: bool = False
    """Updates running statistics among its inputs though its schema does not say so."""
    random_rule: rules.Rule | None = None
    """Check of every single draw."""

    crashes_on: tuple[str, ...] = ()
    """Variants on which ATen accesses memory out of bounds, reads uninitialised memory, aborts, or never ends.

    One operator copies lazy clones in a parallel loop, which its own assertion forbids; others resize them.
    """
    crashes_only_in: str = ""
    """Name of the only overload that does so; empty for all."""

    operations: tuple[str, ...] = ()
    """Operations that it is a name of. A kernel for one name may call no other name."""
    generalises: tuple[str, ...] = ()
    """Operations that are a special case of it. A kernel for these may not call it."""

    formula: Formula | None = None
    """Bytes and operations of a call; without one, torch's tags decide."""
    flops_like: str = ""
    """Attention that torch's flop counter lacks: one it has that takes the same tensors first."""
    returns_no_tensor: bool = False
    """Reads contents although it returns no tensor."""
    ignores_self: bool = False
    """Ignores the contents of ``self`` and uses only its shape or its memory."""
    unread: tuple[str, ...] = ()
    """Other arguments that need not be read: used for their shape, or contents choose a part of them."""
    conditionally_read: tuple[str, ...] = ()
    """Arguments of elementwise operators that are not needed where another argument decides."""
    dtype_decides: bool = False
    """The answer for integers and booleans follows from the dtype."""
    stops_early: bool = False
    """The first elements may settle the answer."""
    stops_early_on_integers: bool = False
    mostly_zeros: bool = False
    """Results hold zeros that need no write: the system hands out zeroed memory."""
    partly_written: bool = False
    """Leaves some of its results unwritten."""


def facts_of(op: Operator) -> OperatorFacts:
    """Return the facts about an operator; those without a record have none."""
    return OPERATOR_FACTS.get(op.packet, _NO_FACTS)


_NO_FACTS = OperatorFacts()

_embedding_bag = gather("weight", fetched_rows("weight", "indices"))

_LISTED: dict[tuple[str, ...], OperatorFacts] = {
    # Elementwise
    (
        "__and__", "__or__", "__iand_", "__ior_", "__irshift_", "absolute", "arccos", "arccosh", "arcsin", "arcsinh",
        "arctan", "arctan2", "arctanh", "divide", "multiply", "subtract", "negative", "greater", "greater_equal",
        "less", "less_equal", "not_equal", "fix", "floor_divide", "elu_backward", "leaky_relu_backward",
        "mish_backward", "softplus_backward", "polar", "complex", "log_sigmoid_forward", "log_sigmoid", "glu",
        "special_expit", "special_erf", "special_erfc", "special_exp2", "special_expm1", "special_log1p",
    ): OperatorFacts(formula=pointwise),
    (
        "celu", "clamp", "clamp_max", "clamp_min", "clip", "elu", "fmax", "fmin", "hardshrink", "hardsigmoid",
        "hardtanh", "leaky_relu", "maximum", "minimum", "nan_to_num", "relu", "relu6", "remainder", "rrelu", "selu",
        "sgn", "sign", "softshrink", "threshold",
    ): OperatorFacts(zero_signs=False),
    ("hardswish",): OperatorFacts(formula=pointwise, zero_signs=False),
    ("prelu", "_prelu_kernel"): OperatorFacts(formula=pointwise, conditionally_read=("weight",), zero_signs=False),
    ("heaviside",): OperatorFacts(conditionally_read=("values",), zero_signs=False),
    ("where", "isclose"): OperatorFacts(formula=pointwise, conditionally_read=("self", "other")),
    ("logical_and", "logical_or"): OperatorFacts(conditionally_read=("self", "other")),
    ("masked_fill",): OperatorFacts(formula=pointwise, conditionally_read=("self",), zero_signs=True),
    ("_masked_scale",): OperatorFacts(formula=pointwise, conditionally_read=("self",)),
    ("special_xlogy",): OperatorFacts(formula=pointwise, conditionally_read=("other",)),
    ("xlogy", "special_xlog1py"): OperatorFacts(conditionally_read=("other",)),
    ("hardshrink_backward",): OperatorFacts(formula=pointwise, conditionally_read=("grad_out",)),
    ("hardtanh_backward", "softshrink_backward", "hardsigmoid_backward", "hardswish_backward"): OperatorFacts(
        formula=pointwise, conditionally_read=("grad_output",),
    ),
    ("threshold_backward", "logit_backward", "native_dropout_backward"): OperatorFacts(
        conditionally_read=("grad_output",),
    ),
    ("isreal",): OperatorFacts(formula=pointwise, dtype_decides=True),
    ("isnan", "isinf", "isfinite", "isposinf", "isneginf", "signbit"): OperatorFacts(dtype_decides=True),

    # Reductions, scans, sorting, losses
    (
        "cumsum", "cumprod", "logcumsumexp", "_logcumsumexp", "nonzero", "nanmean", "bincount", "l1_loss",
        "special_logsumexp", "_foreach_norm", "_foreach_max",
    ): OperatorFacts(formula=reduction),
    ("equal",): OperatorFacts(
        formula=reduction, conditionally_read=("self", "other"), stops_early=True, returns_no_tensor=True,
    ),
    ("allclose", "is_nonzero"): OperatorFacts(formula=reduction, stops_early=True, returns_no_tensor=True),
    ("item", "_local_scalar_dense"): OperatorFacts(formula=reduction, returns_no_tensor=True),
    ("_is_all_true", "_is_any_true"): OperatorFacts(formula=reduction, stops_early=True),
    ("all", "any"): OperatorFacts(stops_early=True),
    ("prod",): OperatorFacts(stops_early_on_integers=True),
    ("max",): OperatorFacts(
        property_check=ties.positions, operations=("greatest element",), stops_early_on_integers=True,
    ),
    ("argmax",): OperatorFacts(
        property_check=partial(ties.positions, result_index=0, default_dim=None), operations=("greatest element",),
        stops_early_on_integers=True,
    ),
    ("amax",): OperatorFacts(operations=("greatest element",), stops_early_on_integers=True, zero_signs=False),
    ("min",): OperatorFacts(
        property_check=ties.positions, operations=("least element",), stops_early_on_integers=True,
    ),
    ("argmin",): OperatorFacts(
        property_check=partial(ties.positions, result_index=0, default_dim=None), operations=("least element",),
        stops_early_on_integers=True,
    ),
    ("amin",): OperatorFacts(operations=("least element",), stops_early_on_integers=True, zero_signs=False),
    ("aminmax",): OperatorFacts(operations=("greatest element", "least element"), stops_early_on_integers=True),
    ("_aminmax",): OperatorFacts(formula=reduction, stops_early_on_integers=True),
    ("cummax", "cummin"): OperatorFacts(formula=reduction, property_check=ties.running_extremum),
    ("sort",): OperatorFacts(
        formula=reduction, property_check=partial(ties.positions, distinct=True), operations=("sorting",),
    ),
    ("argsort",): OperatorFacts(
        formula=reduction, property_check=partial(ties.positions, result_index=0, distinct=True),
        operations=("sorting",),
    ),
    ("topk",): OperatorFacts(formula=reduction, property_check=ties.topk, operations=("sorting",)),
    ("msort",): OperatorFacts(formula=reduction, operations=("sorting",)),
    ("kthvalue", "mode"): OperatorFacts(formula=reduction, property_check=ties.positions),
    ("median", "nanmedian"): OperatorFacts(
        formula=reduction, property_check=ties.positions, crashes_on=("expanded", "expanded_last"),
    ),
    ("_unique2", "unique_dim"): OperatorFacts(formula=reduction, property_check=unique.unique),
    ("_unique",): OperatorFacts(property_check=unique.unique),
    ("var", "std", "var_mean", "std_mean"): OperatorFacts(operations=("variance",)),
    ("norm", "linalg_vector_norm", "linalg_matrix_norm", "frobenius_norm"): OperatorFacts(operations=("norm",)),
    ("dist",): OperatorFacts(formula=reduction, operations=("norm",)),
    ("mse_loss",): OperatorFacts(formula=reduction, crashes_on=("lazy_clone",), crashes_only_in="mse_loss.out"),
    ("huber_loss",): OperatorFacts(formula=reduction, crashes_on=("lazy_clone",), crashes_only_in="huber_loss.out"),
    ("smooth_l1_loss",): OperatorFacts(
        formula=reduction, crashes_on=("lazy_clone",), crashes_only_in="smooth_l1_loss.out",
    ),
    ("soft_margin_loss",): OperatorFacts(
        formula=reduction, crashes_on=("lazy_clone",), crashes_only_in="soft_margin_loss.out",
    ),
    ("multi_margin_loss_backward",): OperatorFacts(crashes_on=("argument:reduction",)),
    ("nll_loss", "nll_loss_forward", "nll_loss2d", "nll_loss2d_forward"): OperatorFacts(formula=class_loss),
    ("nll_loss_backward", "nll_loss2d_backward"): OperatorFacts(formula=class_loss_backward, mostly_zeros=True),
    ("trace",): OperatorFacts(formula=diagonal_elements),
    ("fill_diagonal",): OperatorFacts(formula=diagonal_elements, ignores_self=True),
    ("searchsorted",): OperatorFacts(unread=("sorted_sequence", "sorter")),
    ("bucketize",): OperatorFacts(unread=("boundaries",)),
    ("log_sigmoid_backward",): OperatorFacts(unread=("buffer",)),
    ("rrelu_with_noise_backward",): OperatorFacts(ignores_self=True),
    ("ctc_loss",): OperatorFacts(unread=("log_probs",)),
    ("_ctc_loss",): OperatorFacts(
        unread=("log_probs",),
        nan_is_uninitialised=True,  # log_alpha beyond each target's length
        partly_written=True,
    ),
    ("_cudnn_ctc_loss",): OperatorFacts(partly_written=True),
    ("_ctc_loss_backward",): OperatorFacts(crashes_on=("empty", "lazy_clone")),
    ("segment_reduce", "_segment_reduce_backward"): OperatorFacts(crashes_on=("empty",)),

    # Softmax and norms
    (
        "_softmax", "special_softmax", "_log_softmax", "special_log_softmax", "_safe_softmax",
    ): OperatorFacts(formula=normalisation(5)),
    ("_softmax_backward_data", "_log_softmax_backward_data"): OperatorFacts(formula=normalisation(4)),
    ("softmax", "log_softmax"): OperatorFacts(formula=normalisation(5), operations=("softmax",)),
    ("native_layer_norm",): OperatorFacts(formula=normalisation(5, per_parameter=1)),
    ("native_group_norm",): OperatorFacts(formula=normalisation(5)),
    (
        "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "_native_batch_norm_legit_functional",
        "_batch_norm_with_update", "_batch_norm_no_update",
    ): OperatorFacts(formula=batch_norm),
    ("_fused_rms_norm", "_weight_norm_interface"): OperatorFacts(formula=normalisation(3, per_parameter=1)),
    ("rms_norm",): OperatorFacts(formula=normalisation(3, per_parameter=1), operations=("normalisation",)),
    ("layer_norm",): OperatorFacts(formula=normalisation(5, per_parameter=1), operations=("normalisation",)),
    ("group_norm",): OperatorFacts(formula=normalisation(5), operations=("normalisation",)),
    ("batch_norm", "instance_norm"): OperatorFacts(
        formula=batch_norm, operations=("normalisation",), undeclared_writes=True,
    ),
    ("native_batch_norm", "cudnn_batch_norm"): OperatorFacts(
        formula=batch_norm, undeclared_writes=True, partly_written=True,
    ),
    ("cudnn_batch_norm_backward",): OperatorFacts(formula=norm_backward),
    ("miopen_batch_norm",): OperatorFacts(undeclared_writes=True, partly_written=True),
    ("_batch_norm_impl_index",): OperatorFacts(undeclared_writes=True),
    ("batch_norm_elemt",): OperatorFacts(operations=("normalisation",)),
    ("native_layer_norm_backward", "_fused_rms_norm_backward"): OperatorFacts(formula=norm_backward),
    ("native_batch_norm_backward", "batch_norm_backward"): OperatorFacts(
        formula=norm_backward, crashes_on=("empty",),
    ),
    ("native_group_norm_backward",): OperatorFacts(
        formula=norm_backward, crashes_on=("expanded", "expanded_last"),
    ),

    # Copies, views and new tensors
    (
        "clone", "contiguous", "cat", "stack", "flip", "roll", "rot90", "transpose_copy", "permute_copy", "t_copy",
        "view_copy", "expand_copy", "repeat", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "reshape",
        "alias_copy", "unsqueeze_copy", "squeeze_copy", "detach_copy",
    ): OperatorFacts(formula=full_copy, zero_signs=True),
    (
        "_to_copy", "to", "type_as", "concat", "concatenate", "_stack", "hstack", "vstack", "dstack", "column_stack",
        "row_stack", "fliplr", "flipud", "tile", "native_channel_shuffle", "flatten", "full", "ones", "arange", "range",
        "linspace", "logspace", "scalar_tensor",
    ): OperatorFacts(formula=full_copy),
    ("copy",): OperatorFacts(formula=full_copy, ignores_self=True, zero_signs=True),
    (
        "_foreach_copy", "fill", "full_like", "new_full", "ones_like", "new_ones", "zero", "_foreach_zero",
    ): OperatorFacts(formula=full_copy, ignores_self=True),
    ("zeros_like", "new_zeros"): OperatorFacts(formula=full_copy, ignores_self=True, mostly_zeros=True),
    ("zeros", "eye"): OperatorFacts(formula=full_copy, mostly_zeros=True),
    ("empty_like", "new_empty", "new_empty_strided"): OperatorFacts(ignores_self=True),
    (
        "alias", "detach", "diagonal", "diagonal_copy", "expand", "narrow", "narrow_copy", "permute",
        "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "repeat_interleave", "replication_pad1d",
        "replication_pad2d", "replication_pad3d", "select", "select_copy", "slice", "slice_copy", "split", "split_copy",
        "split_with_sizes", "split_with_sizes_copy", "squeeze", "t", "transpose", "unbind", "unbind_copy", "unfold",
        "unfold_copy", "unsqueeze", "view",
    ): OperatorFacts(zero_signs=True),
    ("as_strided",): OperatorFacts(layout_is_input=True, zero_signs=True),
    ("as_strided_copy",): OperatorFacts(formula=strided_copy, layout_is_input=True, zero_signs=True),
    ("as_strided_scatter",): OperatorFacts(formula=part_replacement, layout_is_input=True),
    ("_reshape_alias", "set"): OperatorFacts(layout_is_input=True),
    ("masked_scatter",): OperatorFacts(formula=masked_scatter, zero_signs=True),
    ("constant_pad_nd", "diag", "diag_embed"): OperatorFacts(
        formula=partial_copy, mostly_zeros=True, zero_signs=True,
    ),
    ("pad", "diagflat", "select_backward", "slice_backward"): OperatorFacts(formula=partial_copy, mostly_zeros=True),
    (
        "block_diag", "diagonal_backward", "embedding_backward", "index_select_backward", "one_hot", "trace_backward",
        "value_selecting_reduction_backward", "_efficientzerotensor",
    ): OperatorFacts(mostly_zeros=True),
    ("embedding_dense_backward",): OperatorFacts(formula=embedding_backward, mostly_zeros=True),
    ("gather_backward", "masked_select_backward"): OperatorFacts(ignores_self=True, mostly_zeros=True),
    ("masked_scatter_backward",): OperatorFacts(unread=("grad_output",)),
    ("unfold_backward",): OperatorFacts(mostly_zeros=True, crashes_on=("zero_dim",)),
    ("_chunk_cat",): OperatorFacts(crashes_on=("zero_dim",)),
    ("slice_scatter", "select_scatter"): OperatorFacts(formula=part_replacement, zero_signs=True),
    ("diagonal_scatter",): OperatorFacts(formula=part_replacement),
    ("tril",): OperatorFacts(
        formula=triangular, mostly_zeros=True, zero_signs=True, crashes_on=("transposed",), crashes_only_in="tril.out",
    ),
    ("triu",): OperatorFacts(
        formula=triangular, mostly_zeros=True, zero_signs=True, crashes_on=("transposed",), crashes_only_in="triu.out",
    ),

    # Indexing
    ("gather", "take"): OperatorFacts(
        formula=gather("self", fetched_along), checks_indices=True, zero_signs=True,
    ),
    ("index_select",): OperatorFacts(
        formula=gather("self", fetched_rows("self", "index")), checks_indices=True, zero_signs=True,
    ),
    ("index",): OperatorFacts(formula=gather("self", fetched_places), checks_indices=True, zero_signs=True),
    ("masked_select",): OperatorFacts(formula=gather("self"), zero_signs=True),
    ("_unsafe_index",): OperatorFacts(formula=gather("self", fetched_places)),
    ("take_along_dim",): OperatorFacts(formula=gather("self", fetched_along)),
    ("embedding",): OperatorFacts(formula=gather("weight", fetched_rows("weight", "indices")), checks_indices=True),
    (
        "grid_sampler", "grid_sampler_2d", "grid_sampler_3d", "cudnn_grid_sampler", "_grid_sampler_2d_cpu_fallback",
        "grid_sampler_3d_backward", "_pack_padded_sequence",
    ): OperatorFacts(unread=("input",)),
    ("_unsafe_masked_index", "embedding_renorm"): OperatorFacts(ignores_self=True),
    ("_unsafe_masked_index_put_accumulate",): OperatorFacts(unread=("values",)),
    ("embedding_bag",): OperatorFacts(
        formula=_embedding_bag, generalises=("matrix product",), unread=("per_sample_weights",),
    ),
    ("_embedding_bag", "_embedding_bag_forward_only"): OperatorFacts(
        formula=_embedding_bag, unread=("per_sample_weights",),  # of padding
    ),
    ("_embedding_bag_backward",): OperatorFacts(crashes_on=("empty",)),
    ("_embedding_bag_per_sample_weights_backward",): OperatorFacts(crashes_on=("empty",), unread=("weight",)),
    ("scatter",): OperatorFacts(formula=scatter("src"), checks_indices=True),
    ("scatter_add", "scatter_reduce"): OperatorFacts(formula=scatter("src", accumulates=True), checks_indices=True),
    ("index_add",): OperatorFacts(formula=scatter("source", accumulates=True), checks_indices=True),
    ("index_reduce",): OperatorFacts(formula=scatter("source", accumulates=True)),
    ("index_copy",): OperatorFacts(formula=scatter("source"), checks_indices=True, zero_signs=True),
    ("put",): OperatorFacts(formula=scatter("source"), checks_indices=True),
    ("index_put",): OperatorFacts(formula=scatter("values"), checks_indices=True),
    ("_index_put_impl", "_unsafe_index_put"): OperatorFacts(formula=scatter("values")),
    ("index_fill",): OperatorFacts(formula=scatter("value"), checks_indices=True),

    # Matrix products, convolutions, attention
    ("mm", "bmm", "_int_mm", "_scaled_mm"): OperatorFacts(
        formula=product("self", "mat2"), operations=("matrix product",),
    ),
    ("addmm", "_addmm_activation"): OperatorFacts(formula=product("mat1", "mat2"), operations=("matrix product",)),
    ("baddbmm",): OperatorFacts(formula=product("batch1", "batch2"), operations=("matrix product",)),
    ("addbmm",): OperatorFacts(
        formula=product("batch1", "batch2"), operations=("matrix product",), crashes_on=("lazy_clone",),
        crashes_only_in="addbmm_.default",
    ),
    ("addmv",): OperatorFacts(formula=product("mat", "vec"), operations=("matrix product",)),
    ("mv",): OperatorFacts(formula=product("self", "vec"), operations=("matrix product",)),
    ("dot",): OperatorFacts(formula=product("self", "tensor"), operations=("matrix product",)),
    ("vdot", "matmul", "linalg_matmul", "inner"): OperatorFacts(
        formula=product("self", "other"), operations=("matrix product",),
    ),
    ("linear",): OperatorFacts(formula=product("input", "weight"), operations=("matrix product",)),
    ("mkldnn_linear",): OperatorFacts(formula=product("self", "weight"), operations=("matrix product",)),
    ("linalg_vecdot",): OperatorFacts(formula=product("x", "y"), operations=("matrix product",)),
    (
        "einsum", "tensordot", "chain_matmul", "linalg_multi_dot", "bilinear", "_trilinear", "_sparse_mm",
    ): OperatorFacts(operations=("matrix product",)),
    ("_grouped_mm", "_scaled_grouped_mm"): OperatorFacts(  # a group without rows needs no factor
        operations=("matrix product",), unread=("mat2",),
    ),
    ("linear_backward",): OperatorFacts(formula=linear_backward),
    (
        "_compute_linear_combination", "mkldnn_rnn_layer", "lstm", "gru", "rnn_tanh", "rnn_relu", "sspaddmm", "hspmm",
        "_dyn_quant_matmul_4bit", "fbgemm_linear_int8_weight", "_mixed_dtypes_linear",
    ): OperatorFacts(generalises=("matrix product",)),
    ("_cudnn_rnn",): OperatorFacts(partly_written=True, unread=("weight_buf",)),
    (
        "_fused_adam", "_fused_adamw", "_fused_adagrad", "_fused_sgd",
    ): OperatorFacts(formula=fused_step),
    (
        "convolution", "_convolution", "convolution_overrideable", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
        "conv_transpose2d", "conv_transpose3d", "_convolution_mode", "cudnn_convolution", "cudnn_convolution_transpose",
        "cudnn_convolution_relu", "mkldnn_convolution", "miopen_convolution", "thnn_conv2d", "_slow_conv2d_forward",
        "slow_conv3d", "slow_conv3d_forward", "slow_conv_transpose2d", "slow_conv_transpose3d", "slow_conv_dilated2d",
        "slow_conv_dilated3d", "conv_depthwise3d", "_conv_depthwise2d",
    ): OperatorFacts(formula=convolution, operations=("convolution",)),
    (
        "conv_tbc", "_nnpack_spatial_convolution", "cudnn_convolution_add_relu", "miopen_depthwise_convolution",
    ): OperatorFacts(operations=("convolution",)),
    ("convolution_backward",): OperatorFacts(
        formula=convolution_backward, generalises=("matrix product", "convolution"),
    ),
    (
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention", "_flash_attention_forward",
        "_cudnn_attention_forward", "_native_multi_head_attention", "_transformer_encoder_layer_fwd",
        "_triton_scaled_dot_attention", "_triton_multi_head_attention",
    ): OperatorFacts(operations=("attention",)),
    ("_scaled_dot_product_efficient_attention", "_efficient_attention_forward"): OperatorFacts(
        operations=("attention",), partly_written=True,
    ),
    (
        "scaled_dot_product_attention", "_scaled_dot_product_attention_math",
        "_scaled_dot_product_fused_attention_overrideable",
    ): OperatorFacts(operations=("attention",), flops_like="_scaled_dot_product_flash_attention"),
    ("_scaled_dot_product_flash_attention_for_cpu",): OperatorFacts(
        operations=("attention",), flops_like="_scaled_dot_product_flash_attention", crashes_on=("transposed",),
    ),
    ("_scaled_dot_product_flash_attention_for_cpu_backward",): OperatorFacts(
        flops_like="_scaled_dot_product_flash_attention_backward",
    ),
    ("_fused_sdp_choice",): OperatorFacts(partly_written=True),

    # Linear algebra, distances, Fourier transforms
    ("inverse", "linalg_inv", "linalg_inv_ex", "linalg_solve", "linalg_solve_ex"): OperatorFacts(
        operations=("inverse",),
    ),
    ("_linalg_solve_ex",): OperatorFacts(
        operations=("inverse",), property_check=partial(qr_lu.lu_packed, factors_index=1),
    ),
    ("_linalg_det",): OperatorFacts(property_check=partial(qr_lu.lu_packed, factors_index=1)),
    ("_linalg_slogdet",): OperatorFacts(property_check=partial(qr_lu.lu_packed, factors_index=2)),
    ("linalg_lu_factor", "linalg_lu_factor_ex", "_lu_with_info"): OperatorFacts(property_check=qr_lu.lu_packed),
    ("linalg_lu",): OperatorFacts(
        property_check=qr_lu.lu, crashes_on=("transposed",), crashes_only_in="linalg_lu.out",
    ),
    ("lu_unpack",): OperatorFacts(crashes_on=("transposed",), crashes_only_in="lu_unpack.out"),
    ("linalg_qr", "qr"): OperatorFacts(property_check=qr_lu.qr),
    ("geqrf",): OperatorFacts(property_check=qr_lu.geqrf),
    ("_linalg_eigh", "linalg_eigh"): OperatorFacts(property_check=spectral.eigh, unread=("A",)),  # half is read
    ("linalg_eig",): OperatorFacts(property_check=spectral.eig),
    ("linalg_eigvals", "_linalg_eigvals"): OperatorFacts(property_check=spectral.eigvals),
    ("_linalg_svd", "linalg_svd"): OperatorFacts(property_check=spectral.svd),
    ("svd",): OperatorFacts(property_check=spectral.svd, operations=("singular values",)),
    ("linalg_svdvals",): OperatorFacts(operations=("singular values",)),
    ("cholesky", "linalg_cholesky_ex"): OperatorFacts(operations=("Cholesky decomposition",), ignores_self=True),
    ("triangular_solve",): OperatorFacts(operations=("triangular solution",), unread=("A",)),  # half of it is read
    ("linalg_solve_triangular",): OperatorFacts(operations=("triangular solution",), ignores_self=True),
    ("linalg_lu_solve", "matrix_exp"): OperatorFacts(generalises=("matrix product",)),
    ("ormqr", "linalg_householder_product"): OperatorFacts(
        generalises=("matrix product",), unread=("self", "input"),
    ),
    ("cholesky_solve",): OperatorFacts(generalises=("matrix product",), unread=("input2",)),
    ("linalg_ldl_solve",): OperatorFacts(generalises=("matrix product", "inverse"), unread=("LD",)),
    ("linalg_ldl_factor", "linalg_ldl_factor_ex", "cholesky_inverse"): OperatorFacts(ignores_self=True),
    ("linalg_lstsq",): OperatorFacts(generalises=("matrix product", "inverse"), crashes_on=("argument:rcond",)),
    ("cdist", "pdist", "_euclidean_dist"): OperatorFacts(operations=("distance",)),
    ("_pdist_backward",): OperatorFacts(crashes_on=("empty",)),
    ("_fft_c2c", "_fft_r2c"): OperatorFacts(operations=("Fourier transform",)),
    ("_fft_c2r",): OperatorFacts(  # believes last_dim_size
        operations=("Fourier transform",),
        crashes_on=("argument:last_dim_size", "argument:dim", "empty", "zero_dim", "long_rows", "long_pitched"),
    ),
    (  # take as many steps as n says
        "special_laguerre_polynomial_l", "special_legendre_polynomial_p",
        "special_chebyshev_polynomial_t", "special_chebyshev_polynomial_u",
        "special_chebyshev_polynomial_v", "special_chebyshev_polynomial_w",
        "special_shifted_chebyshev_polynomial_t", "special_shifted_chebyshev_polynomial_u",
        "special_shifted_chebyshev_polynomial_v", "special_shifted_chebyshev_polynomial_w",
    ): OperatorFacts(
        crashes_on=("extremes", "inf", "integers", "magnitudes", "meeting", "wide_integers"),
    ),

    # Pooling and resampling
    ("max_pool2d",): OperatorFacts(formula=pooling, operations=("maximum pooling",)),
    ("max_pool1d", "max_pool3d", "avg_pool1d", "avg_pool3d"): OperatorFacts(formula=pooling),
    ("max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices"): OperatorFacts(
        formula=pooling, property_check=pool_checks.max_pool,
    ),
    ("adaptive_max_pool1d", "adaptive_max_pool3d"): OperatorFacts(property_check=pool_checks.adaptive_max_pool),
    ("adaptive_max_pool2d",): OperatorFacts(
        property_check=pool_checks.adaptive_max_pool, operations=("maximum pooling",),
    ),
    ("adaptive_max_pool3d_backward",): OperatorFacts(ignores_self=True, crashes_on=("strided", "one_transposed")),
    ("fractional_max_pool2d",): OperatorFacts(
        property_check=pool_checks.fractional_max_pool, operations=("maximum pooling",),
    ),
    ("fractional_max_pool3d",): OperatorFacts(property_check=pool_checks.fractional_max_pool),
    ("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward"): OperatorFacts(
        ignores_self=True, mostly_zeros=True,
    ),
    ("max_unpool2d", "max_unpool3d"): OperatorFacts(mostly_zeros=True),
    (  # use its shape
        "avg_pool2d_backward", "avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward",
        "adaptive_avg_pool3d_backward", "adaptive_max_pool2d_backward", "fractional_max_pool2d_backward",
        "fractional_max_pool3d_backward", "reflection_pad1d_backward", "reflection_pad2d_backward",
        "reflection_pad3d_backward", "replication_pad1d_backward", "replication_pad2d_backward",
        "replication_pad3d_backward",
    ): OperatorFacts(ignores_self=True),
    ("avg_pool2d",): OperatorFacts(formula=pooling, operations=("average pooling",)),
    ("adaptive_avg_pool2d",): OperatorFacts(operations=("average pooling",)),
    ("im2col",): OperatorFacts(formula=partial_copy),
    (
        "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
        "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
    ): OperatorFacts(formula=resampling(1)),
    ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"): OperatorFacts(formula=resampling(2)),
    ("upsample_bicubic2d",): OperatorFacts(formula=resampling(4)),
    ("grid_sampler_2d_backward",): OperatorFacts(crashes_on=("nan", "inf"), unread=("input",)),

    # Random operators
    ("bernoulli",): OperatorFacts(random_rule=rules.bernoulli),
    ("binomial",): OperatorFacts(random_rule=rules.binomial),
    ("cauchy", "normal", "randn_like"): OperatorFacts(ignores_self=True),
    ("dropout",): OperatorFacts(random_rule=rules.dropout),
    ("native_dropout", "_fused_dropout"): OperatorFacts(random_rule=rules.native_dropout),
    ("exponential", "log_normal"): OperatorFacts(random_rule=rules.positive, ignores_self=True),
    ("geometric",): OperatorFacts(random_rule=rules.geometric, ignores_self=True),
    ("multinomial",): OperatorFacts(random_rule=rules.multinomial),
    ("poisson",): OperatorFacts(random_rule=rules.counts),
    ("rand",): OperatorFacts(random_rule=rules.uniform),
    ("rand_like", "uniform"): OperatorFacts(random_rule=rules.uniform, ignores_self=True),
    ("randint",): OperatorFacts(random_rule=rules.randint),
    ("randint_like", "random"): OperatorFacts(random_rule=rules.randint, ignores_self=True),
    ("randperm",): OperatorFacts(random_rule=rules.randperm),
    ("rrelu_with_noise", "rrelu_with_noise_functional"): OperatorFacts(random_rule=rules.rrelu),
    ("_sample_dirichlet",): OperatorFacts(random_rule=rules.dirichlet),
    ("_standard_gamma",): OperatorFacts(random_rule=rules.positive),
}  # fmt: skip

OPERATOR_FACTS = {packet: facts for packets, facts in _LISTED.items() for packet in packets}
"""Facts by packet."""
