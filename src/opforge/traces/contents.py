"""Contents that a call needs for a valid replay: any, within a range, or the original ones.

Seeded floats work for nearly every operator. Integers and booleans may be indices, offsets or
masks; then arbitrary values do not work.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from opforge.cases.values import Arguments, TensorSpec, Value
from opforge.ops import Operator, table
from opforge.ops.undefined import is_solver
from opforge.runtime.trees import instances, map_instances


class Need(enum.Enum):
    """Contents that a tensor needs, apart from a range."""

    ANY = "any similar values"
    EXACT = "the original values"


@dataclass(frozen=True, slots=True)
class IntegersBelow:
    """Integers from 0 up to ``high``, which is excluded."""

    high: int


ContentNeed: TypeAlias = "Need | IntegersBelow"
BoundArguments: TypeAlias = "Mapping[str, Any]"
_Rule: TypeAlias = Callable[[BoundArguments], list[ContentNeed]]

MAX_STORED_BYTES = 1 << 20
"""Largest storage whose exact contents are kept."""

_ANY_INTEGER_OPERATORS = frozenset({
    "cat", "stack", "clone", "copy", "_to_copy", "sum", "cumsum", "cumprod", "prod", "sort", "argsort", "topk", "max",
    "min", "amax", "amin", "aminmax", "any", "all", "argmax", "argmin", "mean", "nonzero", "count_nonzero",
    "unique_dim", "_unique", "_unique2", "unique_consecutive", "fill", "zero", "tril", "triu", "flip", "roll", "repeat",
    "constant_pad_nd", "isin", "equal", "_local_scalar_dense", "is_nonzero", "item", "masked_select", "mm", "bmm",
    "addmm", "select_backward", "slice_backward", "select_scatter", "slice_scatter", "diagonal_scatter", "new_empty",
    "new_zeros", "new_ones", "new_full", "new_empty_strided", "lift_fresh", "lift_fresh_copy",
    "native_dropout_backward", "masked_fill", "_foreach_copy", "cummax", "cummin", "logcumsumexp", "_pin_memory",
    "resize", "set", "view_as_real", "diff", "bincount", "norm", "linalg_vector_norm", "im2col", "col2im",
    "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d", "upsample_nearest2d",
    "_unsafe_view", "floor_divide", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "_reshape_copy",
    "_reshape_alias", "nan_to_num", "histc", "_scaled_dot_product_attention_math",
    "_scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
})  # fmt: skip
"""Operators that accept any integers, besides pointwise operators, reductions and views."""

_SORTED_FLOAT_ARGUMENTS = {"bucketize": {"boundaries"}, "searchsorted": {"sorted_sequence"}}
"""Float arguments that must keep their values, because they are sorted."""

_NON_NEGATIVE_OPERATORS = frozenset({
    "sqrt", "rsqrt", "log", "log2", "log10", "_foreach_sqrt", "_foreach_log", "bernoulli", "multinomial", "poisson",
})  # fmt: skip
"""Operators that should not get negative floats; ``bernoulli`` and ``multinomial`` reject them."""


_WORKSPACE_OPERATORS = frozenset({"mkldnn_rnn_layer_backward", "_cudnn_rnn_backward", "miopen_rnn_backward"})
"""Operators that read a workspace of their forward call.

Its format is private, and ATen crashes on anything else.
"""


def content_needs(op: str, data: Arguments) -> list[ContentNeed]:
    """Return the contents that each tensor of a call needs, in the order of its arguments.

    Raises ValueError if no contents would work.
    """
    facts = table().get(op)
    if facts is not None and facts.packet in _WORKSPACE_OPERATORS:
        raise ValueError("reads the workspace of the call before it, which cannot be replayed")
    if facts is None:
        return [_default_need(spec) for spec in instances(data, TensorSpec)]
    given = facts.bind(*data)
    names = [*(a.name for a in facts.arguments)][: len(data[0])] + list(data[1])
    needed: list[ContentNeed] = []
    for name, value in zip(names, (*data[0], *data[1].values()), strict=True):
        needed += _needs_of_argument(facts, name, value, given)
    return needed


def _needs_positive_floats(op: str) -> bool:
    facts = table().get(op)
    return facts is not None and facts.packet in _NON_NEGATIVE_OPERATORS


def check_storable(spec: TensorSpec) -> None:
    """Raise ValueError if a tensor is too large for its exact contents to be stored."""
    if spec.storage_nbytes > MAX_STORED_BYTES:
        raise ValueError(f"needs the exact contents of a tensor of more than {MAX_STORED_BYTES} bytes")


def with_value_ranges(
    op: str, data: Arguments, with_contents: Callable[[TensorSpec], TensorSpec] | None = None
) -> Arguments:
    """Return a call with value ranges for tensors whose values are unknown.

    ``with_contents`` gives contents to tensors that need exact ones. Raises ValueError if the call cannot be
    replayed without the values.
    """
    wanted = iter(content_needs(op, data))

    def change(spec: TensorSpec) -> TensorSpec:
        need = next(wanted)
        if isinstance(need, IntegersBelow):
            return replace(spec, low=0, high=need.high)
        if need is Need.EXACT and spec.numel:
            if with_contents is None:
                raise ValueError("needs the exact contents of its tensors, which cannot be read")
            return with_contents(spec)
        return with_default_range(op, spec)

    return map_specs(data, change)


def with_default_range(op: str, spec: TensorSpec) -> TensorSpec:
    """Return a tensor with unknown or irrelevant values, in a positive range if needed."""
    return replace(spec, low=0.01, high=1.0) if _needs_positive_floats(op) and not is_integral(spec) else spec


def map_specs(data: Arguments, function: Callable[[TensorSpec], TensorSpec]) -> Arguments:
    """Return a call's arguments with each tensor replaced."""
    changed: Arguments = map_instances(data, TensorSpec, function)
    return changed


def is_integral(spec: TensorSpec) -> bool:
    """Whether a tensor holds integers or booleans."""
    return spec.dtype[0] in "iu" or spec.dtype == "b8"


def _default_need(spec: TensorSpec) -> ContentNeed:
    return Need.EXACT if is_integral(spec) else Need.ANY


def _needs_of_argument(facts: Operator, name: str, value: Value, given: BoundArguments) -> list[ContentNeed]:
    specs = list(instances(value, TensorSpec))
    if name in _SORTED_FLOAT_ARGUMENTS.get(facts.packet, ()) or (
        is_solver(facts.packet) and facts.packet not in _ANY_INTEGER_OPERATORS
    ):
        return [Need.EXACT for _ in specs]
    if not any(map(is_integral, specs)):
        return [Need.ANY for _ in specs]
    rules = _RULES.get(facts.packet)
    if rules is not None and name in rules:
        rule = rules[name]
        return [Need.EXACT for _ in specs] if rule is None else rule(given)
    if rules is not None or _accepts_any_integers(facts):
        return [Need.ANY for _ in specs]
    return [_default_need(spec) for spec in specs]


def _accepts_any_integers(facts: Operator) -> bool:
    views = bool(facts.returns) and all(r.alias is not None and not r.writes for r in facts.returns)
    tagged = facts.tags & {"pointwise", "reduction", "view_copy"}
    return views or bool(tagged) or facts.packet in _ANY_INTEGER_OPERATORS or facts.packet.endswith("_like")


def _rows(argument: str) -> _Rule:
    """Indices into the first dimension of another argument."""
    return lambda given: [IntegersBelow(given[argument].shape[0])]


def _indices_along_dim(given: BoundArguments) -> list[ContentNeed]:
    """Indices into the dimension ``dim`` of ``self``."""
    shape = given["self"].shape
    return [IntegersBelow(shape[given["dim"]] if shape else 1)]


def _number(argument: str) -> _Rule:
    """Indices below a number that is an argument itself."""
    return lambda given: [IntegersBelow(given[argument])]


def _class_indices(given: BoundArguments) -> list[ContentNeed]:
    """Class indices of a loss; the classes are the second dimension, or the only one."""
    shape = given["self"].shape
    return [IntegersBelow(shape[1] if len(shape) > 1 else shape[0])]


def _flat(given: BoundArguments) -> list[ContentNeed]:
    return [IntegersBelow(max(1, given["self"].numel))]


def _advanced_indices(given: BoundArguments) -> list[ContentNeed]:
    """Indices of advanced indexing: one per dimension, except that a mask spans its own number."""
    shape, dim = given["self"].shape, 0
    needed: list[ContentNeed] = []
    writes = "values" in given
    for index in given["indices"]:
        if index is None:
            dim += 1
        elif index.dtype in ("b8", "u8"):
            dim += len(index.shape)
            needed.append(Need.EXACT if writes else Need.ANY)
        else:
            may_repeat = not writes or given.get("accumulate") is True or index.numel == 1
            needed.append(IntegersBelow(max(1, shape[dim])) if may_repeat else Need.EXACT)
            dim += 1
    return needed


def _scatter_indices(given: BoundArguments) -> list[ContentNeed]:
    """Indices to write to; kept if each gets its own value, because none may occur twice."""
    distinct_values = isinstance(given.get("src"), TensorSpec) and given["index"].numel > 1
    return [Need.EXACT] if distinct_values else _indices_along_dim(given)


_RULES: dict[str, dict[str, _Rule | None]] = {
    "embedding": {"indices": _rows("weight")},
    "embedding_dense_backward": {"indices": _number("num_weights")},
    "index_select": {"index": _indices_along_dim},
    "gather": {"index": _indices_along_dim},
    "index_add": {"index": _indices_along_dim},
    "index_fill": {"index": _indices_along_dim},
    "scatter_add": {"index": _indices_along_dim},
    "scatter_reduce": {"index": _indices_along_dim},
    "scatter": {"index": _scatter_indices},
    "index_copy": {"index": None},
    "take": {"index": _flat},
    "index": {"indices": _advanced_indices},
    "_unsafe_index": {"indices": _advanced_indices},
    "index_put": {"indices": _advanced_indices},
    "_index_put_impl": {"indices": _advanced_indices},
    "_unsafe_index_put": {"indices": _advanced_indices},
    "nll_loss_forward": {"target": _class_indices},
    "nll_loss_backward": {"target": _class_indices},
    "nll_loss2d_forward": {"target": _class_indices},
    "nll_loss2d_backward": {"target": _class_indices},
    "cross_entropy_loss": {"target": _class_indices},
    "masked_scatter": {"mask": None},
}
"""Index arguments by packet, and what they need; None for kept ones. Other arguments are free."""
