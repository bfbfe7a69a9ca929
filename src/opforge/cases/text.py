"""Text form of a case's arguments, as in PyTorch's operator-input logs plus some optional fields.

``((T([2, 512], f16, stride=(1, 2)), 1.0), {'dim': -1})``; a log groups such lines under
``Operator:`` headings, each with its count. Text is parsed through Python's syntax tree; nothing is
ever evaluated.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from opforge.cases.values import (
    DTYPES,
    LAYOUTS,
    MEMORY_FORMATS,
    SHORT_NAMES,
    Arguments,
    Device,
    Dtype,
    Layout,
    MemoryFormat,
    TensorSpec,
    Value,
)
from opforge.errors import CaseSyntaxError

_TENSOR_FIELDS = ("stride", "offset", "device", "at", "nbytes", "low", "high")
_SPECIAL_FLOATS = {"inf": math.inf, "nan": math.nan}


def format_arguments(args: Iterable[Value], kwargs: dict[str, Value]) -> str:
    """Return the text form of a call's arguments."""
    named = ", ".join(f"{name!r}: {format_value(value)}" for name, value in kwargs.items())
    return f"({format_value(tuple(args))}, {{{named}}})"


def parse_arguments(text: str) -> Arguments:
    """Parse the positional and named arguments of a text form."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CaseSyntaxError(f"not a case: {_shorten(text)!r} ({error})") from None
    if not (isinstance(node, ast.Tuple) and len(node.elts) == 2):
        raise CaseSyntaxError(f"not a case: {_shorten(text)!r} (expected '((positional, …), {{'name': value}})')")
    try:
        args, kwargs = _parse(node.elts[0]), _parse_named_arguments(node.elts[1])
    except (CaseSyntaxError, RecursionError) as error:
        raise CaseSyntaxError(f"{error} in {_shorten(text)!r}") from None
    if not isinstance(args, tuple):
        raise CaseSyntaxError(f"positional arguments must be a tuple in {_shorten(text)!r}")
    return args, kwargs


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One line of an operator-input log."""

    op: str
    count: int
    args: str


def parse_log(lines: Iterable[str]) -> Iterator[LogEntry | CaseSyntaxError]:
    """Parse an operator-input log; yield the error of a line that cannot be parsed, and go on."""
    op = ""
    known: dict[str, str] = {}
    """Normalised texts: logs of several models repeat most of them."""
    for number, raw in enumerate(lines, 1):
        line = raw.strip()
        if not line:
            continue
        if line.startswith("Operator:"):
            op = line.removeprefix("Operator:").strip()
            continue
        head, _, text = line.partition(",")
        count = head.removeprefix("cnt:").strip()
        if not (op and head.startswith("cnt:") and count.isdigit()):
            yield CaseSyntaxError(
                f"line {number}: expected 'Operator: NAME' or 'cnt: N, (…)', found {_shorten(line)!r}"
            )
            continue
        if text not in known:
            try:
                known[text] = format_arguments(*parse_arguments(text))
            except CaseSyntaxError as error:
                yield CaseSyntaxError(f"line {number}: {error}")
                continue
        yield LogEntry(op, int(count), known[text])


def format_log(entries: Iterable[LogEntry]) -> Iterator[str]:
    """Yield the lines of an operator-input log; entries of one operator should be adjacent."""
    op = None
    for entry in entries:
        if entry.op != op:
            op = entry.op
            yield f"Operator: {op}"
        yield f"cnt: {entry.count}, {entry.args}"


def format_value(value: Value) -> str:
    """Return the text form of one argument."""
    match value:
        case TensorSpec():
            return _format_tensor(value)
        case Dtype(short):
            return short
        case Layout(name) | MemoryFormat(name):
            return f"torch.{name}"
        case Device(name):
            return f"device({name!r})"
        case complex():
            return f"complex({value.real!r}, {value.imag!r})"
        case tuple():
            inside = ", ".join(map(format_value, value))
            return f"({inside},)" if len(value) == 1 else f"({inside})"
        case list():
            return f"[{', '.join(map(format_value, value))}]"
        case _:
            return repr(value)


def _format_tensor(spec: TensorSpec) -> str:
    parts = [str(list(spec.shape)), spec.dtype]
    for name in _TENSOR_FIELDS:
        value = getattr(spec, name)
        if value is not None and not (name == "offset" and value == 0):
            parts.append(f"{name}={value!r}")
    return f"T({', '.join(parts)})"


def _parse(node: ast.expr) -> Value:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | complex() | str()):
            return node.value  # type: ignore[return-value]  # bytes and Ellipsis are excluded by the pattern
        case ast.Tuple():
            return tuple(_parse(e) for e in node.elts)
        case ast.List():
            return [_parse(e) for e in node.elts]
        case ast.Call(func=ast.Name(id=name)) if name in _CALLS:
            return _CALLS[name](node)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="device")):
            return _parse_device(node)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
            return _parse_sign(node)
        case ast.BinOp(op=ast.Add() | ast.Sub(), left=left, right=right):
            return _parse_complex_sum(left, right, minus=isinstance(node.op, ast.Sub))
        case ast.Name(id=name):
            return _parse_name(name)
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            return _parse_name(name)
    raise CaseSyntaxError(f"{_shorten(ast.unparse(node))!r} is not a value")


def _parse_name(name: str) -> Value:
    if name in DTYPES:
        return Dtype(name)
    if name in SHORT_NAMES:
        return Dtype(SHORT_NAMES[name])
    if name in LAYOUTS:
        return Layout(name)
    if name in MEMORY_FORMATS:
        return MemoryFormat(name)
    if name in _SPECIAL_FLOATS:
        return _SPECIAL_FLOATS[name]
    raise CaseSyntaxError(f"{name!r} is not a dtype, layout, memory format, inf or nan")


def _parse_sign(node: ast.UnaryOp) -> Value:
    value = _parse(node.operand)
    if isinstance(value, bool) or not isinstance(value, int | float | complex):
        raise CaseSyntaxError(f"{_shorten(ast.unparse(node))!r} is not a number")
    return -value if isinstance(node.op, ast.USub) else value


def _parse_complex_sum(left: ast.expr, right: ast.expr, *, minus: bool) -> complex:
    real, imaginary = _parse(left), _parse(right)
    if isinstance(real, bool) or not isinstance(real, int | float) or not isinstance(imaginary, complex):
        raise CaseSyntaxError("a sum must be a complex number such as (1+2j)")
    return real - imaginary if minus else real + imaginary


def _parse_named_arguments(node: ast.expr) -> dict[str, Value]:
    if not isinstance(node, ast.Dict):
        raise CaseSyntaxError("named arguments must be a dict")
    names: dict[str, Value] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
            raise CaseSyntaxError("names of arguments must be strings")
        names[key.value] = _parse(value)
    return names


def _parse_complex_call(node: ast.Call) -> complex:
    parts = [_parse(a) for a in node.args]
    if len(parts) != 2 or node.keywords or not all(isinstance(p, int | float) for p in parts):
        raise CaseSyntaxError("complex takes two numbers")
    return complex(*parts)  # type: ignore[arg-type]


def _parse_device(node: ast.Call) -> Device:
    named: dict[str | None, Any] = {k.arg: _parse(k.value) for k in node.keywords}
    parts = [_parse(a) for a in node.args] + [named[k] for k in ("type", "index") if k in named]
    if not (1 <= len(parts) <= 2 and isinstance(parts[0], str) and all(isinstance(w, int) for w in parts[1:])):
        raise CaseSyntaxError("device takes a name such as 'cuda:0', or a type and an index")
    return Device(":".join(map(str, parts)))


def _parse_tensor(node: ast.Call) -> TensorSpec:
    if not 2 <= len(node.args) <= 4:
        raise CaseSyntaxError("T takes a shape and a dtype, then named fields")
    shape, dtype = _parse(node.args[0]), _parse(node.args[1])
    if not isinstance(dtype, Dtype):
        raise CaseSyntaxError(f"{_shorten(ast.unparse(node.args[1]))!r} is not a dtype")
    positional = zip(("stride", "device"), map(_parse, node.args[2:]), strict=False)  # as BackendBench writes them
    fields: dict[str, Any] = {name: value for name, value in positional if value is not None}
    for keyword in node.keywords:
        if keyword.arg not in _TENSOR_FIELDS:
            raise CaseSyntaxError(f"T has no field {keyword.arg!r}; it has {', '.join(_TENSOR_FIELDS)}")
        fields[keyword.arg] = _parse(keyword.value)
    return _checked_tensor(shape, dtype.short, fields)


def _checked_tensor(shape: Value, dtype: str, fields: dict[str, Any]) -> TensorSpec:
    sizes = _checked_sizes(shape, "shape")
    if "stride" in fields:
        fields["stride"] = _checked_sizes(fields["stride"], "stride")
        if len(fields["stride"]) != len(sizes):
            raise CaseSyntaxError(f"stride {fields['stride']} does not fit shape {list(sizes)}")
    for name in ("offset", "at", "nbytes"):
        if name in fields and not _is_size(fields[name]):
            raise CaseSyntaxError(f"{name}={fields[name]!r} must be a whole number, not negative")
    if isinstance(fields.get("device"), Device):
        fields["device"] = fields["device"].name
    if not isinstance(fields.get("device", ""), str):
        raise CaseSyntaxError(f"device={fields['device']!r} must be a string such as 'cuda:0'")
    spec = TensorSpec(sizes, dtype, **fields)
    needed_nbytes = TensorSpec(sizes, dtype, stride=spec.stride, offset=spec.offset).storage_nbytes
    if spec.nbytes is not None and spec.nbytes < needed_nbytes and spec.numel:
        raise CaseSyntaxError(f"nbytes={spec.nbytes} is less than the {needed_nbytes} that the geometry reaches")
    return spec


def _checked_sizes(value: Value, label: str) -> tuple[int, ...]:
    if isinstance(value, list | tuple) and all(_is_size(v) for v in value):
        return tuple(value)  # type: ignore[arg-type]
    raise CaseSyntaxError(f"{label} {value!r} must be a list of whole numbers, not negative")


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _shorten(text: str, limit: int = 120) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"


_CALLS: dict[str, Callable[[ast.Call], Value]] = {
    "T": _parse_tensor,
    "complex": _parse_complex_call,
    "device": _parse_device,
}
