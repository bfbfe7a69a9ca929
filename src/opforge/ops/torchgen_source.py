"""Read all operators from torchgen's native_functions.yaml. Takes a second; see ``table``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opforge.ops.operator import DEVICES, Argument, Operator, SchemaKind

_KINDS = {"functional": SchemaKind.FUNCTIONAL, "inplace": SchemaKind.INPLACE, "out": SchemaKind.OUT}
_ALL_DEVICE_KEYS = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
_ORDER = (SchemaKind.FUNCTIONAL, SchemaKind.INPLACE, SchemaKind.OUT, SchemaKind.MUTABLE)


def read_operators() -> list[Operator]:
    """Return all overloads with their families, in the order of the file."""
    import torchgen
    from torchgen.gen import parse_native_yaml, pre_group_native_functions

    folder = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native"
    parsed = parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml"))
    functions = parsed.native_functions
    families: dict[str, str] = {}
    for group in pre_group_native_functions(functions).values():
        members = sorted(group.values(), key=lambda f: _ORDER.index(_form(f)))
        families.update({_name(member): _name(members[0]) for member in members})
    by_name = {function.func.name: function for function in functions}
    return [
        _operator(
            function,
            families[_name(function)],
            _devices(by_name, parsed.backend_indices, function),
            composite=_is_composite(by_name, parsed.backend_indices, function),
        )
        for function in functions
    ]


def _devices(by_name: dict[Any, Any], indices: dict[Any, Any], function: Any) -> frozenset[str]:
    """Return the devices with a kernel; a structured operator uses its out form's kernel."""
    from torchgen.model import DispatchKey

    if function.structured_delegate is not None:
        function = by_name[function.structured_delegate]
    keys = {key for key, index in indices.items() if index.get_kernel(function) is not None}
    if keys & {getattr(DispatchKey, name) for name in _ALL_DEVICE_KEYS}:
        return DEVICES
    return frozenset(device for device in DEVICES if DispatchKey.parse(device.upper()) in keys)


def _is_composite(by_name: dict[Any, Any], indices: dict[Any, Any], function: Any) -> bool:
    """Whether an operator is composite on every device.

    Operators that also have their own kernel for a common device do not count.
    """
    from torchgen.model import DispatchKey

    kernel_function = by_name[function.structured_delegate] if function.structured_delegate is not None else function
    return function.has_composite_implicit_autograd_kernel and not any(
        indices[DispatchKey.parse(device.upper())].has_kernel(kernel_function) for device in DEVICES
    )


def _name(function: Any) -> str:
    name = function.func.name
    return f"{name.name}.{name.overload_name or 'default'}"


def _form(function: Any) -> SchemaKind:
    return _KINDS.get(function.func.kind().name, SchemaKind.MUTABLE)


def _operator(function: Any, family: str, devices: frozenset[str], *, composite: bool) -> Operator:
    schema = function.func
    arguments = [_argument(a, kwarg_only=False) for a in schema.arguments.flat_positional]
    arguments += [_argument(a, kwarg_only=True) for a in schema.arguments.flat_kwarg_only]
    arguments += [_argument(a, kwarg_only=True) for a in schema.arguments.out]
    base, overload = _name(function).split(".")
    return Operator(
        base=base,
        overload=overload,
        schema=str(schema),
        kind=_form(function),
        family=family,
        arguments=tuple(arguments),
        returns=tuple(_argument(r, kwarg_only=False) for r in schema.returns),
        composite=composite,
        tags=frozenset(function.tags),
        devices=devices,
    )


def _argument(argument: Any, *, kwarg_only: bool) -> Argument:
    annotation = argument.annotation
    return Argument(
        name=argument.name or "",
        type=str(argument.type),
        default=getattr(argument, "default", None),
        kwarg_only=kwarg_only,
        alias="|".join(annotation.alias_set) if annotation else None,
        writes=bool(annotation and annotation.is_write),
    )
