"""Register an operator's functional form and its out variant from one definition."""

from __future__ import annotations

from torch.library import Library, register_fake

from opforge.edge.out_variants import LIBRARIES, Function, out_function, out_variant
from opforge.errors import OpforgeError


def define(schema: str, function: Function, *, fake: Function | None = None) -> None:
    """Register ``namespace::name(…) -> …`` and its out variant, both computed by one function.

    A function made of torch operators also serves fake tensors. Any other one, such as one that
    calls NumPy or C++, needs ``fake``, which returns empty tensors of the right shape and dtype.
    """
    form = out_variant(schema)
    library = Library(form.namespace, "FRAGMENT")
    LIBRARIES.append(library)
    try:
        library.define(form.functional_schema)
        library.define(form.out_schema)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise OpforgeError(
            f"{form.namespace}::{form.name} cannot be registered: {reason}; is it registered twice?"
        ) from None
    key = "CompositeExplicitAutograd" if fake is None else "CPU"
    library.impl(form.name, function, key)
    library.impl(f"{form.name}.out", out_function(function, form), key)
    if fake is not None:
        register_fake(f"{form.namespace}::{form.name}", fake, lib=library)
        register_fake(f"{form.namespace}::{form.name}.out", out_function(fake, form), lib=library)
