"""Out variants of operators: derive one from a functional schema, and register it.

The runtime calls out variants. Only the registration needs torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from opforge.errors import OpforgeError

if TYPE_CHECKING:
    from torchgen.model import FunctionSchema

Function = Callable[..., Any]
_EXAMPLE = "my_ops::mul3(Tensor x) -> Tensor"
LIBRARIES: list[Any] = []
"""Keeps libraries alive: a registration ends with its library."""


@dataclass(frozen=True, slots=True)
class OutVariant:
    """An operator's functional form with its out variant."""

    namespace: str
    name: str
    functional_schema: str
    """Schema without the namespace."""
    out_schema: str
    out_arguments: tuple[str, ...]
    """Names of the arguments that are written: ``out``, or ``out0``, ``out1``."""


def out_variant(schema: str) -> OutVariant:
    """Return the out variant of a functional schema: the same arguments, plus one per result."""
    namespace, separator, functional = " ".join(schema.split()).partition("::")
    if not separator or not namespace.isidentifier():
        raise OpforgeError(f"{schema!r} has no namespace; write it as {_EXAMPLE!r}")
    parsed = parse_schema(functional)
    name = functional.partition("(")[0]
    if not name.isidentifier():
        raise OpforgeError(f"{schema!r}: {name!r} is not a plain name; the overload .out is added for the out variant")
    if parsed.arguments.out or any(argument.is_write for argument in parsed.arguments.flat_all):
        raise OpforgeError(f"{schema!r} writes to an argument; give the functional form, the out variant is derived")
    results = [str(result.type) for result in parsed.returns]
    if not results or any(kind != "Tensor" for kind in results):
        raise OpforgeError(
            f"{schema!r} returns {', '.join(results) or 'nothing'}; the runtime writes tensors: one or more"
        )
    outputs = ("out",) if len(results) == 1 else tuple(f"out{number}" for number in range(len(results)))
    marks = [f"Tensor({chr(ord('a') + number)}!)" for number in range(len(results))]
    arguments = str(parsed.arguments)
    keyword = "" if parsed.arguments.pre_tensor_options_kwarg_only else "*, "
    added = ", ".join(f"{mark} {output}" for mark, output in zip(marks, outputs, strict=True))
    returned = marks[0] if len(marks) == 1 else f"({', '.join(marks)})"
    return OutVariant(
        namespace,
        name,
        functional,
        f"{name}.out({arguments}{', ' if arguments else ''}{keyword}{added}) -> {returned}",
        outputs,
    )


def parse_schema(schema: str) -> FunctionSchema:
    """Parse a schema given without its namespace; raise if it is invalid."""
    from torchgen.model import FunctionSchema

    try:
        return FunctionSchema.parse(schema)
    except (AssertionError, RuntimeError, ValueError, KeyError) as error:
        spaced = re.search(r"=\[[^\]]*, ", schema) is not None
        hint = "; write lists without spaces, as in int[] dims=[0,1]" if spaced else ""
        raise OpforgeError(f"{schema!r} is not a schema: {' '.join(str(error).split())}{hint}") from None


def register_out(*names: str) -> list[str]:
    """Register the missing out variants of operators (``ns::name``); return the new ones.

    A variant runs the operator and copies its results into the given tensors. Export needs it to
    plan memory, and eager PyTorch can call it. On the device the kernel of ops.yaml runs.
    """
    import torch

    registered = []
    for name in names:
        operator = _operator(name)
        form = out_variant(str(operator._schema))  # noqa: SLF001  # torch has no public name for it
        full = f"{name}.out"
        if full in torch._C._dispatch_get_all_op_names():  # noqa: SLF001  # nor for the list of operators
            continue
        library = torch.library.Library(form.namespace, "FRAGMENT")
        LIBRARIES.append(library)
        library.define(form.out_schema)
        library.impl(f"{form.name}.out", out_function(operator, form), "CompositeExplicitAutograd")
        torch.library.register_fake(full, _returning_out(form), lib=library)
        registered.append(full)
    return registered


def _operator(name: str) -> Any:
    import torch

    namespace, separator, base = name.partition("::")
    if not separator or not base.isidentifier():
        raise OpforgeError(f"{name!r} is not the full name of an operator; write namespace::name, such as my_ops::mul3")
    try:
        return getattr(getattr(torch.ops, namespace), base).default
    except AttributeError:
        raise OpforgeError(f"there is no operator {name}; import the package that registers it first") from None


def out_function(function: Function, form: OutVariant) -> Function:
    """Return a function that writes the results of another into its out arguments."""

    def call(*args: Any, **kwargs: Any) -> Any:
        targets = [kwargs.pop(name) for name in form.out_arguments]
        results = function(*args, **kwargs)
        for target, result in zip(targets, [results] if len(targets) == 1 else results, strict=True):
            if target.shape != result.shape:
                target.resize_(result.shape)
            target.copy_(result)
        return targets[0] if len(targets) == 1 else tuple(targets)

    return call


def _returning_out(form: OutVariant) -> Function:
    """Return the fake implementation of the out variant: it returns the given tensors."""

    def call(*_args: Any, **kwargs: Any) -> Any:
        targets = [kwargs[name] for name in form.out_arguments]
        return targets[0] if len(targets) == 1 else tuple(targets)

    return call
