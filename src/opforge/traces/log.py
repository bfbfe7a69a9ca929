"""Convert traces from and to PyTorch's operator-input logs. Needs no torch.

A log has neither contents nor ranges: export drops them, and import gives indices the range that
their operator needs. Logs are older than today's operators: lines that no longer fit are counted
with their reason.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from opforge.cache import torch_version
from opforge.cases.text import LogEntry, format_arguments, format_log, parse_arguments, parse_log
from opforge.cases.values import Arguments, Device, TensorSpec, Value
from opforge.errors import CaseSyntaxError
from opforge.ops import Operator, table
from opforge.runtime.trees import map_instances
from opforge.traces.call_cost import estimate_result_bytes, flops, input_bytes
from opforge.traces.collect import StoredContents
from opforge.traces.contents import check_storable, map_specs, with_value_ranges
from opforge.traces.pool_indices import POOL_BACKWARD_DIMS, indices_in_windows
from opforge.traces.stream import OFFSET_PLACEHOLDER
from opforge.traces.trace_file import CallCount, Trace, TracedCall

PHASE = "log"
_SYMINT_REPLACEMENTS = ("default", "dim_IntList", "int")
"""Overloads that replaced those named ``SymInt``."""
_NUMBERS = (bool, int, float, complex)


def to_log(trace: Trace) -> Iterator[str]:
    """Return the lines of a log that PyTorch's own tools read."""
    calls = sorted(trace.calls, key=lambda c: (c.op, -c.count, c.args))
    return format_log(LogEntry(_log_name(c.op), c.count, _log_text(c.args)) for c in calls)


def from_log(lines: Iterable[str], model: str) -> Trace:
    """Return the trace of a log; its losses say which lines are unusable, and why."""
    losses: Counter[str] = Counter()
    calls: dict[tuple[str, str], TracedCall] = {}
    known: dict[tuple[str, str], TracedCall | str] = {}
    """Call of each distinct line, counted once, or why the line is unusable."""
    contents = StoredContents()
    for entry in parse_log(lines):
        if isinstance(entry, CaseSyntaxError):
            losses[_unreadable_reason(str(entry))] += 1
            continue
        line = entry.op, entry.args
        if line not in known:
            known[line] = _call_or_reason(entry, model, contents)
        call = known[line]
        if isinstance(call, str):
            losses[call] += 1
            continue
        key = call.op, call.args
        before = calls[key].count if key in calls else 0
        calls[key] = _counted(call, before + entry.count)
    return Trace(list(calls.values()), {"models": [model], "device": "cuda"}, dict(losses.most_common()))


def read_log(path: Path) -> Trace:
    """Return the trace of a log file."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return from_log(file, path.stem)


def is_log(path: Path) -> bool:
    """Whether a file starts like a log."""
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                return line.lstrip().startswith(b"Operator:")
    return False


def _log_name(op: str) -> str:
    return op.replace("::", ".") if "::" in op else f"aten.{op}"


def _log_text(args: str) -> str:
    """Return arguments in log form: tensors without offset and contents, devices as strings."""
    data = map_specs(parse_arguments(args), lambda s: TensorSpec(s.shape, s.dtype, s.stride))
    return format_arguments(*map_instances(data, Device, lambda device: device.name.partition(":")[0]))


def _counted(call: TracedCall, count: int) -> TracedCall:
    return replace(call, count=count, seen=(replace(call.seen[0], count=count),))


def _call_or_reason(entry: LogEntry, model: str, contents: StoredContents) -> TracedCall | str:
    try:
        return _call(entry, model, contents)
    except ValueError as error:
        return f"{entry.op}: {error}"


def _call(entry: LogEntry, model: str, contents: StoredContents) -> TracedCall:
    """Return the call of one line; raise ValueError with the reason if it is unusable."""
    name, data = _resampling_today(entry.op, parse_arguments(entry.args))
    facts = _operator(name, data)
    data = _with_devices(facts, data)
    parts: list[bytes] = []

    def with_indices(spec: TensorSpec) -> TensorSpec:
        check_storable(spec)
        parts.append(indices_in_windows(facts.packet, facts.bind(*data)))
        return replace(spec, at=OFFSET_PLACEHOLDER + len(parts) - 1)

    ranged = with_value_ranges(facts.name, data, with_indices if facts.packet in POOL_BACKWARD_DIMS else None)
    placed = contents.place(format_arguments(*ranged), parts)
    return TracedCall(
        facts.name,
        placed.args,
        entry.count,
        input_bytes(data),
        estimate_result_bytes(facts.name, data),
        flops(facts.name, data),
        f"{model} {PHASE}",
        placed.digest,
        placed.stored_at,
        (CallCount(model, PHASE, entry.count),),
        placed.stored,
    )


def _resampling_today(name: str, data: Arguments) -> tuple[str, Arguments]:
    """Return a call of ``upsample_*_backward.vec``, which torch no longer has, as one of its default overload.

    The size of its output is that of its gradient.
    """
    base, _, overload = name.rpartition(".")
    if overload != "vec" or not re.fullmatch(r"(aten\.)?_?upsample_\w+_backward", base):
        return name, data
    args: tuple[Any, ...] = data[0]
    if data[1] or len(args) < 4 or not isinstance(args[0], TensorSpec) or not isinstance(args[2], list | tuple):
        raise ValueError("its arguments are not (grad_output, output_size, input_size, …, scale_factors)")
    grad, _output_size, input_size, *align_corners, scales = args
    spatial = len(input_size) - 2
    scales = [None] * spatial if scales is None else scales
    if len(grad.shape) != len(input_size) or not isinstance(scales, list | tuple) or len(scales) != spatial:
        raise ValueError(f"its sizes or scale factors are not those of {spatial} dimensions")
    return f"{base}.default", ((grad, list(grad.shape[2:]), input_size, *align_corners, *scales), {})


def _operator(name: str, data: Arguments) -> Operator:
    """Return the operator of a line; raise ValueError if none today takes its arguments."""
    if name.count(".") == 2 and not name.startswith("aten."):
        raise ValueError("not an operator of ATen")
    short = name.removeprefix("aten.")
    base, _, overload = short.partition(".")
    names = [short] if overload != "SymInt" else [short, *(f"{base}.{other}" for other in _SYMINT_REPLACEMENTS)]
    candidates = [facts for facts in map(table().get, names) if facts is not None]
    if not candidates:
        raise ValueError(f"no such operator in torch {torch_version()}")
    reasons = [schema_mismatch(facts, data) for facts in candidates]
    if all(reasons):
        raise ValueError(f"its arguments are not those of torch {torch_version()}: {reasons[0]}")
    return candidates[reasons.index("")]


def schema_mismatch(facts: Operator, data: Arguments) -> str:
    """Return why a schema does not take some arguments; empty if it does."""
    args, kwargs = data
    positional = [a for a in facts.arguments if not a.kwarg_only]
    if len(args) > len(positional):
        return f"{len(args)} positional arguments, and it takes {len(positional)}"
    names = {a.name for a in facts.arguments}
    if unknown := [name for name in kwargs if name not in names]:
        return f"no argument {unknown[0]!r}"
    given = facts.bind(args, kwargs)
    for argument in facts.arguments:
        if argument.name not in given:
            if argument.default is None:
                return f"{argument.name!r} is missing"
        elif wrong := _type_mismatch(argument.type, given[argument.name]):
            return f"{argument.name!r} is {wrong}, not {argument.type}"
    return ""


def _type_mismatch(type_: str, value: Value) -> str:
    """Describe a value that a type does not take, or return ''; a number may stand for a tensor."""
    if value is None:
        return "" if "?" in type_ else "None"
    tensor_wanted = type_.startswith("Tensor")
    several = "[" in type_
    if isinstance(value, TensorSpec):
        return "" if tensor_wanted and not several else "a tensor"
    if isinstance(value, list | tuple):
        return "" if several else "a list"
    if tensor_wanted:
        return "" if isinstance(value, _NUMBERS) and not several else f"{value!r}"
    if type_.startswith(("int", "SymInt")) and isinstance(value, float | str):
        return f"{value!r}"
    return ""


def _with_devices(facts: Operator, data: Arguments) -> Arguments:
    """Return arguments with device names converted to devices."""
    types = {a.name: a.type for a in facts.arguments}
    args, kwargs = data
    return args, {
        n: Device(v) if isinstance(v, str) and types[n].startswith("Device") else v for n, v in kwargs.items()
    }


def _unreadable_reason(error: str) -> str:
    """Return why a line is unreadable, without number and text, to count equal reasons as one."""
    text = re.sub(r"^line \d+: ", "", error)
    if "'ST(" in text:
        return "not read: a sparse tensor"
    return "not read: " + re.sub(r" in '.*$", "", text)[:160]
