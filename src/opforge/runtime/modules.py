"""Modules of a kernel: its file and those that lie beside it, always read from their sources, and in a program its own."""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)
from pathlib import Path
from types import ModuleType
from typing import Any

_SHARED = sys.stdlib_module_names | {"numpy", "opforge", "torch", "triton"}
"""Modules that are everybody's, whatever lies beside a kernel: they are there before it is loaded."""
_swapping = threading.RLock()


class _FromSource(SourceFileLoader):
    """Compiles a module anew: a cache of bytecode is known by whole seconds and a length, and may be of another source."""

    builtins: dict[str, Any] | None = None

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)

    def exec_module(self, module: ModuleType) -> None:
        if self.builtins is not None:
            module.__dict__["__builtins__"] = self.builtins
        super().exec_module(module)


class Beside(MetaPathFinder):
    """Finds the modules in a folder and below it."""

    def __init__(self, folder: Path, names: Mapping[str, Any] | None = None) -> None:
        """Modules that are found have ``names`` for their builtins, if any are given."""
        self._folder = str(folder)
        self._builtins = None if names is None else dict(names)
        self._finders: dict[str, FileFinder] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for place in [self._folder] if path is None else path:
            if place != self._folder and not place.startswith(self._folder + os.sep):
                continue
            if place not in self._finders:
                details = (ExtensionFileLoader, EXTENSION_SUFFIXES), (_FromSource, SOURCE_SUFFIXES)
                self._finders[place] = FileFinder(place, *details)
            found = self._finders[place].find_spec(fullname, target)
            if found is not None and found.loader is not None:
                if isinstance(found.loader, _FromSource):
                    found.loader.builtins = self._builtins
                return found
        return None


def from_source(name: str, file: Path, names: Mapping[str, Any] | None = None) -> ModuleSpec | None:
    """Return how a file becomes a module, with ``names`` for its builtins if any are given; None for one that is not Python."""
    if file.suffix not in SOURCE_SUFFIXES:
        return None
    loader = _FromSource(name, str(file))
    loader.builtins = None if names is None else dict(names)
    return importlib.util.spec_from_file_location(name, file, loader=loader)


class Own:
    """The modules beside a kernel's file; the program, or another kernel, may have others of the same names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = _modules_in(folder) - _SHARED
        self._modules: dict[str, ModuleType] = {}
        self._inside = False
        self.builtins = {**vars(builtins), "__import__": self._import} if self._names else None
        """What its modules have for builtins, so that functions can import too, long after they were loaded."""
        self._finder = Beside(folder, self.builtins)

    @contextmanager
    def found(self) -> Iterator[None]:
        """Let them be found in here, and nothing else by their names."""
        with _swapping:
            aside = self._taken()
            sys.modules.update(self._modules)
            sys.meta_path.insert(0, self._finder)
            sys.path.insert(0, str(self._folder))
            self._inside = True
            try:
                yield
            finally:
                self._inside = False
                sys.path.remove(str(self._folder))
                sys.meta_path.remove(self._finder)
                self._modules = self._taken()
                sys.modules.update(aside)

    def _taken(self) -> dict[str, ModuleType]:
        """Take the modules with these names from where all modules are; return them."""
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in self._names}

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,  # noqa: A002  # Python's own names for it
        locals: Mapping[str, Any] | None = None,  # noqa: A002
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        package = str((globals or {}).get("__package__") or "") if level else name
        if self._inside or package.partition(".")[0] not in self._names:
            return builtins.__import__(name, globals, locals, fromlist, level)
        known = None if level else self._modules.get(name)
        if known is not None and all(hasattr(known, item) for item in fromlist or ()):
            return known if fromlist else self._modules[name.partition(".")[0]]
        with self.found():
            return builtins.__import__(name, globals, locals, fromlist, level)


def _modules_in(folder: Path) -> set[str]:
    """Return the names by which modules and packages in a folder are imported."""
    found = set()
    for entry in folder.iterdir():
        if entry.suffix in (".py", ".so") or (entry.is_dir() and next(entry.glob("*.py"), None) is not None):
            found.add(entry.name.partition(".")[0])
    return found
