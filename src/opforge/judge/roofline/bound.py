"""Speed of light: least cost of a call, its time at measured peaks, and alarms for faster times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from opforge.judge.facts import facts_of
from opforge.judge.roofline.arithmetic import ArithmeticKind
from opforge.judge.roofline.costed_call import CostedCall
from opforge.judge.roofline.formulas import (
    CallWork,
    Formula,
    default_work,
    partial_copy,
    pointwise,
    read_arguments,
    reduction,
    zero_work,
)
from opforge.judge.roofline.matrix_formulas import attention
from opforge.judge.roofline.peaks import Peaks
from opforge.judge.roofline.tensor_memory import distinct_bytes
from opforge.ops import Operator, table
from opforge.ops.undefined import UNDEFINED_CONTENTS

ALARM_MARGIN = {"cpu": 0.25, "cuda": 0.15}
"""Share of the hard bound by which a time must be shorter to raise an alarm.

It allows for the accuracy of the peaks. They are ATen's best, which another kernel may beat. A
CPU's clock and caches are shared, so they may have been measured at a slow time."""

_DYNAMIC_SHAPE_TAG = "dynamic_output_shape"
"""Tag of operators that must read contents to know the size of their result."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Least cost of a call."""

    moved_bytes: int
    """Fewest bytes that must move: the needed inputs once, the results once."""
    in_place: bool
    """Whether results are written where inputs were read."""
    flops: int
    kind: ArithmeticKind
    method: str
    """``formula``, or ``estimate`` for operators without one."""
    required_bytes: int = 0
    """Bytes that every honest kernel must read or write, whatever the contents."""
    required_input_bytes: int = 0
    """Those of them that are inputs."""
    required_flops: int = 0
    written_bytes: int = 0
    """Those of ``moved_bytes`` that are written."""
    touched_bytes: int | None = None
    """Memory that they lie in: bytes read and written back count once. None: ``moved_bytes``."""

    def footprint(self, calls: int) -> int:
        """Return the memory that calls touch, each with its own inputs and results."""
        return calls * (self.moved_bytes if self.touched_bytes is None else self.touched_bytes)


def cost(op: Operator, args: Iterable[Any], kwargs: dict[str, Any], result: Any) -> Cost:
    """Return the least cost of a call, from shapes and strides of its arguments and ATen's result.

    The arguments must be those of the call: results that share memory with them count as views.
    """
    call = CostedCall(op, tuple(args), kwargs, result, facts_of(op))
    need = _need(call)
    written = distinct_bytes(call.outputs) if need.written_bytes is None else need.written_bytes
    sure_tensors = [*need.required_inputs, *(call.outputs if need.requires_all_writes else [])]
    tensors = [t for t in [*call.outputs, *call.tensors(*call.inputs)] if t.layout is torch.strided]
    sure_input_tensors = [*need.required_inputs, *(call.written if need.requires_all_writes and call.in_place else [])]
    return Cost(
        moved_bytes=need.read_bytes + written,
        written_bytes=written,
        touched_bytes=min(need.read_bytes + written, distinct_bytes(tensors)),
        in_place=call.in_place and any(a.writes and a.name in read_arguments(call) for a in op.arguments),
        flops=_lane_operations(call, need),
        kind=need.kind,
        method="formula" if need.has_formula else "estimate",
        required_bytes=distinct_bytes(sure_tensors),
        required_input_bytes=distinct_bytes(sure_input_tensors),
        required_flops=need.required_flops,
    )


def _lane_operations(call: CostedCall, need: CallWork) -> int:
    """Return operations as the device's lanes of four bytes compute them: several small integers fit into one."""
    if need.kind is not ArithmeticKind.INTEGER:
        return need.flops
    sizes = [t.element_size() for t in [*call.outputs, *call.tensors(*call.inputs)]]
    return need.flops * min(_LANE_BYTES, max(sizes, default=_LANE_BYTES)) // _LANE_BYTES


_LANE_BYTES = 4


def _need(call: CostedCall) -> CallWork:
    empty = not any(t.numel() for t in call.outputs) and not (call.new_results and _DYNAMIC_SHAPE_TAG in call.op.tags)
    if not call.facts.returns_no_tensor and (empty or call.op.base in UNDEFINED_CONTENTS):
        return zero_work(call)
    if any(t.layout is not torch.strided for t in [*call.outputs, *call.tensors(*call.bound_arguments)]):
        return default_work(call)
    formula = call.facts.formula or _formula_by_tag(call.op)
    if formula is None:
        formula = attention if "attention" in call.op.packet and call.tensors("query") else default_work
    return formula(call)


@cache
def _tags(family: str) -> frozenset[str]:
    op = table().get(family)
    members = table().family(op) if op is not None else []
    return frozenset(tag for member in members for tag in member.tags)


def _formula_by_tag(op: Operator) -> Formula | None:
    """Return the formula implied by torch's tags on any variant of the operator."""
    tags = _tags(op.family) | op.tags
    if "reduction" in tags:
        return reduction
    if "pointwise" in tags or (op.base.startswith("_foreach_") and not op.base.startswith(_FOREACH_NOT_POINTWISE)):
        return pointwise
    return partial_copy if "view_copy" in tags else None


_FOREACH_NOT_POINTWISE = ("_foreach_mm", "_foreach_norm", "_foreach_max", "_foreach_powsum")


def sol_us(cost: Cost, peaks: Peaks, footprint_bytes: int, *, kept_bytes: int = 0) -> tuple[float, str]:
    """Return the least time that a call can take, and its limit: ``memory`` or ``compute``.

    ``footprint_bytes`` is the memory touched before the same memory is used again. It sets the
    bandwidth. ``kept_bytes`` of the results need not leave the cache while calls are timed.
    """
    to_memory = cost.moved_bytes - min(cost.written_bytes, kept_bytes)
    memory_us = max(
        _us(to_memory, peaks.bandwidth(footprint_bytes, in_place=cost.in_place)),
        _us(cost.moved_bytes, peaks.bandwidth(0, in_place=cost.in_place)),
    )
    rate = peaks.rate(cost.kind)
    compute_us = _us(cost.flops, rate) if rate else 0.0
    return (compute_us, "compute") if compute_us > memory_us else (memory_us, "memory")


def hard_bound_us(cost: Cost, peaks: Peaks, footprint_bytes: int) -> float:
    """Return a time that no honest kernel beats, from required memory and fastest arithmetic."""
    fastest = peaks.fastest_rate
    return max(
        _us(cost.required_input_bytes, peaks.bandwidth(footprint_bytes)),
        _us(cost.required_bytes, peaks.bandwidth(min(footprint_bytes, cost.required_bytes))),
        _us(cost.required_flops, fastest) if fastest else 0.0,
    )


def sol_figures(
    cost: Cost,
    peaks: Peaks,
    footprint_bytes: int,
    kernel_us: float,
    aten_us: float,
    *,
    kernel_us_high: float | None = None,
    floor_us: float | None = None,
    kept_bytes: int = 0,
) -> dict[str, Any]:
    """Return the field ``sol`` of a line of results, and ``alarm`` if the kernel is too fast.

    ``kernel_us_high`` is the slow end of the interval of the kernel's time. If ATen's time is also below
    the bound, the peaks are too low, and there is no alarm. ``floor_us`` is the time of the smallest launch or
    call: below it neither memory nor arithmetic is the limit, and percentages would say nothing.
    """
    us, bound = sol_us(cost, peaks, footprint_bytes, kept_bytes=kept_bytes)
    is_latency_bound = floor_us is not None and us < floor_us
    sol = {
        "bytes": cost.moved_bytes,
        "flops": cost.flops,
        "us": us,
        "bound": "latency" if is_latency_bound else bound,
        **({} if is_latency_bound else {"kernel": 100 * us / kernel_us, "aten": 100 * us / aten_us}),
        "counted": cost.method,
    }
    slow = kernel_us if kernel_us_high is None else max(kernel_us_high, kernel_us)
    least = hard_bound_us(cost, peaks, footprint_bytes)
    limit = least * (1 - ALARM_MARGIN[peaks.device_type])
    if slow >= limit or aten_us < limit:
        return {"sol": sol}
    work = f"{cost.required_bytes:,} bytes" + (
        f" and {cost.required_flops:,} operations" if cost.required_flops else ""
    )
    alarm = (
        f"faster than the speed of light (SOL): {slow:.3g} µs for {work}, "
        f"which take at least {least:.3g} µs at the measured peaks of {peaks.device}"
    )
    return {"sol": sol, "alarm": alarm}


def _us(amount: float, per_second: float) -> float:
    return amount / per_second * 1e6
