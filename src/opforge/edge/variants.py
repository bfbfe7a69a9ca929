"""Register out variants for operators without one, such as those made by `opforge new`."""

from __future__ import annotations

from typing import Any

from opforge.edge.schemas import OutVariant, out_variant
from opforge.errors import OpforgeError

_LIBRARIES: list[Any] = []
"""Keeps libraries alive: a registration ends with its library."""


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
        _LIBRARIES.append(library)
        library.define(form.out_schema)
        library.impl(f"{form.name}.out", _out_function(operator, form), "CompositeExplicitAutograd")
        torch.library.register_fake(full, _fake(form), lib=library)
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


def _out_function(operator: Any, form: OutVariant) -> Any:
    """Return an implementation of the out variant that calls the operator."""

    def run(*arguments: Any, **named: Any) -> Any:
        targets = [named.pop(name) for name in form.out_arguments]
        results = operator(*arguments, **named)
        for target, result in zip(targets, results if len(targets) > 1 else [results], strict=True):
            target.resize_(result.shape)
            target.copy_(result)
        return tuple(targets) if len(targets) > 1 else targets[0]

    return run


def _fake(form: OutVariant) -> Any:
    """Return the fake implementation of the out variant: it returns the given tensors."""

    def run(*_arguments: Any, **named: Any) -> Any:
        targets = [named[name] for name in form.out_arguments]
        return tuple(targets) if len(targets) > 1 else targets[0]

    return run
