"""Out variants: operators that have none, such as those of a package made by `opforge new`, get one from their own schema and implementation."""

from __future__ import annotations

import re
from typing import Any

from opforge.errors import OpforgeError

_SCHEMA = re.compile(r"(?P<name>[\w:]+)(?:\.(?P<overload>\w+))?\((?P<arguments>.*)\) -> (?P<returns>.*)")
_libraries: list[Any] = []
"""Torch forgets what a library defines when nobody holds it."""


def out_schema(schema: str) -> str:
    """Return the schema of the out variant: an argument that is written to, after all others, for each tensor that is returned."""
    found = _SCHEMA.fullmatch(schema.strip())
    if found is None:
        raise OpforgeError(f"{schema!r} is no schema of an operator; one looks like ns::name(Tensor x) -> Tensor")
    name, arguments = found["name"], found["arguments"]
    if "!" in arguments:
        raise OpforgeError(f"{name} writes to its arguments; an out variant belongs to an operator that writes to none")
    outs = _outs(name, found["returns"])
    overload = f"{found['overload']}_out" if found["overload"] else "out"
    keyword_only = [] if re.search(r"(^|, )\*, ", arguments) else ["*"]
    words = [arguments] if arguments else []
    words += keyword_only + [f"Tensor({letter}!) {out}" for letter, out in outs]
    returned = ", ".join(f"Tensor({letter}!)" for letter, _ in outs)
    return f"{name}.{overload}({', '.join(words)}) -> {f'({returned})' if len(outs) > 1 else returned}"


def _outs(name: str, returns: str) -> list[tuple[str, str]]:
    """Return letters and names for the tensors that come back."""
    words = [word.split() for word in returns.strip("()").split(", ")] if returns != "()" else []
    if not words or any(word[0] != "Tensor" for word in words):
        raise OpforgeError(f"{name} returns {returns}; an out variant needs one tensor or several, and nothing else")
    names = [word[1] if len(word) > 1 else f"out{number}" for number, word in enumerate(words)]
    letters = "abcdefghijklmnopqrstuvwxyz"
    return [(letters[number], names[number] if len(words) > 1 else "out") for number in range(len(words))]


def register_out(*names: str) -> list[str]:
    """Register the out variants of operators (``ns::name``) which lack one; returns what was registered.

    The variant runs the operator and copies its results into the given tensors: that is for eager PyTorch and for export,
    which plans memory with it. On the device the kernel of the ops.yaml runs.
    """
    import torch

    made = []
    for name in names:
        operator = _operator(name)
        schema = out_schema(str(operator._schema))  # noqa: SLF001  # torch has no public name for it
        full = schema.partition("(")[0]
        namespace, _, rest = full.partition("::")
        if _is_there(full):
            continue
        library = torch.library.Library(namespace, "FRAGMENT")
        _libraries.append(library)
        library.define(schema.removeprefix(f"{namespace}::"))
        outs = re.findall(r"Tensor\(\w!\) (\w+)", schema)
        library.impl(rest, _through(operator, outs), "CompositeExplicitAutograd")
        torch.library.register_fake(full, _fake(outs), lib=library)
        made.append(full)
    return made


def _operator(name: str) -> Any:
    import torch

    if "::" not in name:
        raise OpforgeError(f"{name!r} is no full name of an operator; write namespace::name, such as my_ops::mul3")
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    except AttributeError:
        raise OpforgeError(f"there is no operator {name}; import the package that registers it first") from None


def _is_there(full: str) -> bool:
    import torch

    return full in torch._C._dispatch_get_all_op_names()  # noqa: SLF001  # torch has no public list of operators


def _through(operator: Any, outs: list[str]) -> Any:
    """Return an implementation of the out variant that calls the operator."""

    def run(*arguments: Any, **named: Any) -> Any:
        given = [named.pop(out) for out in outs]
        results = operator(*arguments, **named)
        for out, result in zip(given, results if len(outs) > 1 else (results,), strict=True):
            out.resize_(result.shape)
            out.copy_(result)
        return tuple(given) if len(outs) > 1 else given[0]

    return run


def _fake(outs: list[str]) -> Any:
    """Return what stands for the out variant where there are shapes and no contents: the given tensors come back."""

    def run(*_arguments: Any, **named: Any) -> Any:
        given = [named[out] for out in outs]
        return tuple(given) if len(outs) > 1 else given[0]

    return run
