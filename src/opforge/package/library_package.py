"""Write the Python package of a library: it checks for clashes, loads it, and exports functions."""

from __future__ import annotations

import json
import keyword
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jinja2

from opforge.cache import torch_version, write_atomically
from opforge.errors import OpforgeError
from opforge.kernels.native.builder import BuiltLibrary, LibrarySpec
from opforge.kernels.native.inspect import LibraryInspection

_TYPES = {
    "Tensor": "torch.Tensor", "int": "int", "SymInt": "int", "float": "float", "bool": "bool", "str": "str",
    "Scalar": "int | float | bool | "
        "complex", "ScalarType": "torch.dtype", "Device": "torch.device", "Layout": "torch.layout",
    "MemoryFormat": "torch.memory_format", "Generator": "torch.Generator",
}  # fmt: skip


def write_library_package(folder: Path, unit: LibrarySpec, built: BuiltLibrary, look: LibraryInspection) -> Path:
    """Write a library's package into a folder.

    Each file is replaced atomically, so processes that use the old package continue to work.
    """
    functions = _overloads_by_function(look.operators)
    facts = {
        "name": unit.name,
        "file": built.library.name,
        "claims": look.claimed_namespaces,
        "operators": list(look.operators),
        "functions": {name: min(o.partition(".")[0] for o in overloads) for name, overloads in functions.items()},
        "torch": torch_version().partition("+")[0] if built.abi == "full" else "",
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _copy(built.library, folder / built.library.name)
        write_atomically(folder / "__init__.py", _render("package.py.j2", **facts))
        write_atomically(
            folder / "__init__.pyi", _render("package.pyi.j2", name=unit.name, stubs=_stubs(functions, look.operators))
        )
        write_atomically(folder / "py.typed", "")
        for path in folder.iterdir():
            if path.is_file():
                path.chmod(0o755 if path.suffix == ".so" else 0o644)
    except OSError as error:
        raise OpforgeError(
            f"the package {str(folder)!r} cannot be written: {error.strerror}; give another place with --out"
        ) from None
    return folder


def _copy(library: Path, place: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=place.parent, prefix=f".{place.name}.", delete=False) as handle:
        shutil.copyfile(library, handle.name)
    Path(handle.name).replace(place)


def _overloads_by_function(operators: dict[str, str]) -> dict[str, list[str]]:
    """Return the overloads by function name.

    Keywords and names used in several namespaces cannot be functions of a module.
    """
    overloads: dict[str, list[str]] = {}
    for operator in operators:
        name = operator.partition("::")[2].partition(".")[0]
        if not keyword.iskeyword(name):
            overloads.setdefault(name, []).append(operator)
    return {name: names for name, names in overloads.items() if len({o.partition("::")[0] for o in names}) == 1}


def _render(template: str, **values: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,  # noqa: S701  # Python source
    )
    environment.filters["literal"] = lambda value: json.dumps(value) if isinstance(value, str) else repr(value)
    return environment.get_template(template).render(**values)


def _stubs(functions: dict[str, list[str]], schemas: dict[str, str]) -> list[str]:
    stubs = []
    for name, operators in functions.items():
        lines = [_stub(name, schemas[operator]) for operator in operators]
        stubs += [f"@overload\n{line}" for line in lines] if len(lines) > 1 else lines
    return stubs


def _stub(name: str, schema: str) -> str:
    """Return an operator's stub line; generic if torchgen cannot parse the schema."""
    from torchgen.model import FunctionSchema

    try:
        parsed = FunctionSchema.parse(schema.partition("::")[2])
    except (AssertionError, RuntimeError, ValueError):
        return f"def {name}(*args: Any, **kwargs: Any) -> Any: ..."
    positional = [_parameter(a) for a in parsed.arguments.flat_positional]
    keyword_only = [_parameter(a) for a in (*parsed.arguments.flat_kwarg_only, *parsed.arguments.out)]
    returns = [_type(str(r.type)) for r in parsed.returns]
    result = "None" if not returns else returns[0] if len(returns) == 1 else f"tuple[{', '.join(returns)}]"
    return f"def {name}({', '.join([*positional, *(['*'] if keyword_only else []), *keyword_only])}) -> {result}: ..."


def _parameter(argument: Any) -> str:
    name = f"{argument.name}_" if keyword.iskeyword(argument.name) else argument.name
    return f"{name}: {_type(str(argument.type))}" + (" = ..." if argument.default is not None else "")


def _type(text: str) -> str:
    if text.endswith("?"):
        return f"{_type(text[:-1])} | None"
    if text.endswith("]"):
        return f"Sequence[{_type(text.partition('[')[0])}]"
    return _TYPES.get(text, "Any")
