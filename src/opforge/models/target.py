"""Locate the model named on the command line, without running its code. Needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from opforge.errors import OpforgeError
from opforge.traces.targets import LIBRARIES, Settings

_EXPECTED = (
    "give a Python file that defines model() and inputs(), module:function for a function that returns the model and "
    "its inputs, "
    "or an architecture's name: hf:CLASS (of transformers), timm:NAME or torchvision:NAME"
)


@dataclass(frozen=True, slots=True)
class ModelTarget:
    """The location of a model's code."""

    name: str
    """As the user wrote it."""
    file: str = ""
    """Path of a file with ``model`` and ``inputs``."""
    module: str = ""
    function: str = ""
    """Of the module; for `opforge edge` also of the file: it returns a model, or is a model class."""
    folder: str = ""
    """The folder its modules are imported from."""
    reads: str = ""
    """The file or package whose folder a worker may read."""
    library: str = ""
    """For an architecture by name: a key of LIBRARIES."""
    architecture: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    """For an architecture: its size and dtype."""

    def wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, row: Mapping[str, Any]) -> ModelTarget:
        return cls(**row)


def find_model(argument: str, settings: Settings | None = None) -> ModelTarget:
    """Return the model named by ``FILE.py``, ``module:function`` or an architecture's name.

    An architecture's name is such as ``hf:BertModel``. The settings give its size; they apply to
    architectures only.
    """
    module, colon, function = argument.partition(":")
    if module in LIBRARIES and function:
        return _architecture(argument, module, function, settings or Settings())
    if settings not in (None, Settings()):
        raise OpforgeError(
            "--batch, --seq, --image, --layers and --set require an architecture such as hf:BertModel, not "
            f"{argument!r}"
        )
    if argument.endswith(".py"):
        path = Path(argument)
        if not path.is_file():
            raise OpforgeError(f"there is no file {argument!r}; {_EXPECTED}")
        file = path.resolve()
        return ModelTarget(argument, file=str(file), folder=str(file.parent), reads=str(file))
    if not colon:
        raise OpforgeError(f"unknown model {argument!r}; {_EXPECTED}")
    if not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise OpforgeError(f"{argument!r} is not module:function; {_EXPECTED}")
    code_path = _top_level_path(module)
    return ModelTarget(argument, module=module, function=function, folder=str(code_path.parent), reads=str(code_path))


def _architecture(argument: str, library: str, name: str, settings: Settings) -> ModelTarget:
    package = LIBRARIES[library]
    spec = PathFinder.find_spec(package, sys.path)
    if spec is None:
        raise OpforgeError(f"{argument} needs the package {package}; install it with `pip install {package}`")
    code_path = _spec_path(spec, package)
    given = settings.checked().as_json()
    return ModelTarget(
        argument, folder=str(code_path.parent), reads=str(code_path), library=library, architecture=name, settings=given
    )


def _top_level_path(module: str) -> Path:
    """Return the file or folder of a module's top-level package, searched here and on sys.path."""
    path: list[str] | None = [str(Path.cwd()), *sys.path]
    first: ModuleSpec | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), path)
        if spec is None or path is None:
            raise OpforgeError(
                f"there is no module {'.'.join(parts[:depth])!r}, neither in this folder nor where Python looks; "
                f"{_EXPECTED}"
            )
        first = first or spec
        path = list(spec.submodule_search_locations) if spec.submodule_search_locations else None
    return _spec_path(first, module)


def _spec_path(spec: ModuleSpec | None, module: str) -> Path:
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    if spec is None or not spec.origin or not Path(spec.origin).exists():
        raise OpforgeError(f"module {module!r} has no file; {_EXPECTED}")
    return Path(spec.origin).resolve()
