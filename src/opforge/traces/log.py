"""PyTorch's operator-input logs, both ways. Needs no torch.

A log has neither contents nor ranges: on the way out they are dropped, and on the way in indices get the range that their
operator needs. Logs are older than the operators of today: what no longer fits is counted with its reason.
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
from opforge.traces.contents import mapped, without_values
from opforge.traces.file import Seen, Trace, TracedCall
from opforge.traces.measure import flops, input_bytes, made_bytes

PHASE = "log"
_FALLBACKS = ("default", "dim_IntList", "int")
"""Overloads that took the place of those named ``SymInt``."""
_NUMBERS = (bool, int, float, complex)


def to_log(trace: Trace) -> Iterator[str]:
    """Return the lines of a log that PyTorch's own tools read."""
    calls = sorted(trace.calls, key=lambda c: (c.op, -c.count, c.args))
    return format_log(LogEntry(_log_name(c.op), c.count, _log_text(c.args)) for c in calls)


def from_log(lines: Iterable[str], model: str) -> Trace:
    """Return the trace that a log tells of; its losses say which lines are of no use, and why."""
    losses: Counter[str] = Counter()
    calls: dict[tuple[str, str], TracedCall] = {}
    known: dict[tuple[str, str], TracedCall | str] = {}
    """Of each distinct line its call, counted once, or why it is of no use."""
    for entry in parse_log(lines):
        if isinstance(entry, CaseSyntaxError):
            losses[_unread(str(entry))] += 1
            continue
        line = entry.op, entry.args
        if line not in known:
            known[line] = _call_or_reason(entry, model)
        call = known[line]
        if isinstance(call, str):
            losses[call] += 1
            continue
        key = call.op, call.args
        before = calls[key].count if key in calls else 0
        calls[key] = _counted(call, before + entry.count)
    return Trace(list(calls.values()), {"models": [model], "device": "cuda"}, dict(losses.most_common()))


def read_log(path: Path) -> Trace:
    """Return the trace of a log's file."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return from_log(file, path.stem)


def is_log(path: Path) -> bool:
    """Whether a file begins as a log does."""
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                return line.lstrip().startswith(b"Operator:")
    return False


def _log_name(op: str) -> str:
    return op.replace("::", ".") if "::" in op else f"aten.{op}"


def _log_text(args: str) -> str:
    """Return arguments as a log has them: tensors without place and contents, devices as words."""
    positional, named = mapped(parse_arguments(args), lambda s: TensorSpec(s.shape, s.dtype, s.stride))
    return format_arguments((_worded(v) for v in positional), {n: _worded(v) for n, v in named.items()})


def _worded(value: Value) -> Value:
    return value.name.partition(":")[0] if isinstance(value, Device) else value


def _counted(call: TracedCall, count: int) -> TracedCall:
    return replace(call, count=count, seen=(replace(call.seen[0], count=count),))


def _call_or_reason(entry: LogEntry, model: str) -> TracedCall | str:
    try:
        return _call(entry, model)
    except ValueError as error:
        return f"{entry.op}: {error}"


def _call(entry: LogEntry, model: str) -> TracedCall:
    """Return the call of one line; raises ValueError with the reason when it is of no use."""
    data = parse_arguments(entry.args)
    facts = _operator(entry.op, data)
    data = _with_devices(facts, data)
    data = without_values(facts.name, data)
    figures: dict[str, Any] = {
        "input_bytes": input_bytes(data),
        "result_bytes": made_bytes(facts.name, data),
        "flops": flops(facts.name, data),
    }
    seen = (Seen(model, PHASE, entry.count),)
    return TracedCall(facts.name, format_arguments(*data), entry.count, **figures, source=f"{model} {PHASE}", seen=seen)


def _operator(name: str, data: Arguments) -> Operator:
    """Return the operator that a line means, if there is one today that takes its arguments."""
    if name.count(".") == 2 and not name.startswith("aten."):
        raise ValueError("not an operator of ATen")
    short = name.removeprefix("aten.")
    base, _, overload = short.partition(".")
    names = [short] if overload != "SymInt" else [short, *(f"{base}.{other}" for other in _FALLBACKS)]
    found = [facts for facts in map(table().get, names) if facts is not None]
    if not found:
        raise ValueError(f"no such operator in torch {torch_version()}")
    reasons = [misfit(facts, data) for facts in found]
    if all(reasons):
        raise ValueError(f"its arguments are not those of torch {torch_version()}: {reasons[0]}")
    return found[reasons.index("")]


def misfit(facts: Operator, data: Arguments) -> str:
    """Say why a schema does not take some arguments; nothing when it does."""
    args, kwargs = data
    plain = [a for a in facts.arguments if not a.kwarg_only]
    if len(args) > len(plain):
        return f"{len(args)} arguments by position, and it takes {len(plain)}"
    names = {a.name for a in facts.arguments}
    if unknown := [name for name in kwargs if name not in names]:
        return f"no argument {unknown[0]!r}"
    given = facts.bind(args, kwargs)
    for argument in facts.arguments:
        if argument.name not in given:
            if argument.default is None:
                return f"{argument.name!r} is missing"
        elif wrong := _wrong(argument.type, given[argument.name]):
            return f"{argument.name!r} is {wrong}, not {argument.type}"
    return ""


def _wrong(type_: str, value: Value) -> str:
    """Say what a value is where a type takes another kind of thing; a number may stand for a tensor."""
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
    """Return arguments in which the names of devices are devices."""
    types = {a.name: a.type for a in facts.arguments}
    args, kwargs = data
    return args, {
        n: Device(v) if isinstance(v, str) and types[n].startswith("Device") else v for n, v in kwargs.items()
    }


def _unread(error: str) -> str:
    """Return why a line cannot be read, without its number and text, so that equal reasons are counted together."""
    text = re.sub(r"^line \d+: ", "", error)
    if "'ST(" in text:
        return "not read: a sparse tensor"
    return "not read: " + re.sub(r" in '.*$", "", text)[:160]
