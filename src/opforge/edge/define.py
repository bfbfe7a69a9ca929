"""Register an operator's functional form and its out variant from one definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library, register_fake

from opforge.edge.schemas import OutVariant, out_variant
from opforge.errors import OpforgeError

Function = Callable[..., Any]
_LIBRARIES: list[Library] = []
"""Keeps libraries alive: a registration ends with its library."""


def define(schema: str, function: Function, *, fake: Function | None = None) -> None:
    """Register ``namespace::name(…) -> …`` and its out variant, both computed by one function.

    A function made of torch operators also serves fake tensors. Any other one, such as one that
    calls NumPy or C++, needs ``fake``, which returns empty tensors of the right shape and dtype.
    """
    form = out_variant(schema)
    library = Library(form.namespace, "FRAGMENT")
    _LIBRARIES.append(library)
    try:
        library.define(form.functional_schema)
        library.define(form.out_schema)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise OpforgeError(
            f"{form.namespace}::{form.name} cannot be registered: {reason}; is it registered twice?"
        ) from None
    key = "CompositeExplicitAutograd" if fake is None else "CPU"
    variant = _out_function(function, form)
    library.impl(form.name, function, key)
    library.impl(f"{form.name}.out", variant, key)
    if fake is not None:
        register_fake(f"{form.namespace}::{form.name}", fake, lib=library)
        register_fake(f"{form.namespace}::{form.name}.out", _out_function(fake, form), lib=library)


def _out_function(function: Function, form: OutVariant) -> Function:
    """Return a function that writes the results into its out arguments."""

    def call(*args: Any, **kwargs: Any) -> Any:
        targets = [kwargs.pop(name) for name in form.out_arguments]
        results = function(*args, **kwargs)
        for target, result in zip(targets, [results] if len(targets) == 1 else results, strict=True):
            _write_result(target, result)
        return targets[0] if len(targets) == 1 else tuple(targets)

    return call


def _write_result(target: torch.Tensor, result: torch.Tensor) -> None:
    if target.shape != result.shape:
        target.resize_(result.shape)
    target.copy_(result)
