"""Modules of a kernel: its file and those that lie beside it, always read from their sources, and its own in whatever program it runs.

They are the modules of a package that has the folder for its place and a name that nobody else has. Where they import each other, it is said
relative to that package when they are compiled, so that neither the program nor another kernel is in their way, or they in theirs.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)
from importlib.util import module_from_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_PREFIX = "opforge_kernel_"
_SHARED = sys.stdlib_module_names | {"__main__", "numpy", "opforge", "torch", "triton"}
"""Modules that are everybody's, whatever lies beside a kernel."""
_UNUSED = "_imported_from_beside"
"""What a module is called that is imported for being there: ``import a.b`` makes only ``a`` known."""


def load_file(file: Path) -> ModuleType:
    """Return a kernel's file as a module, read anew with what it imports from beside it; whatever it raises goes on."""
    stem = file.stem.replace(".", "_")  # a dot would make it a module of another package
    package = f"{_PREFIX}{hashlib.sha256(os.fsencode(file.parent)).hexdigest()[:12]}_{stem}"
    name = f"{package}.{stem}"
    forget(package)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    whole = ModuleType(package)
    whole.__path__ = [str(file.parent)]
    whole.__spec__ = ModuleSpec(package, None, is_package=True)
    sys.modules[package] = whole
    loader = _FromSource(name, str(file))  # and not by the finder, which lists the folder: not everyone may
    spec = ModuleSpec(name, loader, origin=str(file))
    spec.has_location = True
    module = sys.modules[name] = module_from_spec(spec)
    try:
        loader.exec_module(module)
    except BaseException:
        forget(package)
        raise
    setattr(whole, stem, module)
    return module


def forget(package: str) -> None:
    """Take a package and its modules from where all modules are."""
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]


class _Finder(MetaPathFinder):
    """Finds the modules of kernels' packages, and nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is None or not fullname.startswith(_PREFIX):
            return None
        for place in path:
            finder = FileFinder(place, (ExtensionFileLoader, EXTENSION_SUFFIXES), (_FromSource, SOURCE_SUFFIXES))
            if (found := finder.find_spec(fullname, target)) is not None:
                return found
        return None


class _FromSource(SourceFileLoader):
    """Compiles a module anew: a cache of bytecode is known by whole seconds and a length, and may be of another source."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        package = fullname if self.is_package(fullname) else fullname.rpartition(".")[0]
        whole, *inner = package.split(".")
        folder = Path(sys.modules[whole].__path__[0])
        tree = _Relative(_modules_in(folder) - _SHARED, 1 + len(inner)).visit(ast.parse(self.get_data(path), path))
        code: CodeType = self.source_to_code(tree, path)
        return code


class _Relative(ast.NodeTransformer):
    """Makes imports of some modules relative ones, so many levels up."""

    def __init__(self, names: set[str], level: int) -> None:
        self._names = names
        self._level = level

    def visit_Import(self, node: ast.Import) -> Any:
        return [ast.copy_location(new, node) for alias in node.names for new in self._said(alias)]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        if not node.level and (node.module or "").partition(".")[0] in self._names:
            node.level = self._level
        return node

    def _said(self, alias: ast.alias) -> Iterator[ast.stmt]:
        within, _, last = alias.name.rpartition(".")
        top = alias.name.partition(".")[0]
        if top not in self._names:
            yield ast.Import([alias])
            return
        if within:
            yield ast.ImportFrom(within, [_alias(alias, last, alias.asname or _UNUSED)], self._level)
        if not within or not alias.asname:
            yield ast.ImportFrom(None, [_alias(alias, top, alias.asname)], self._level)


def _alias(like: ast.alias, name: str, asname: str | None) -> ast.alias:
    return ast.copy_location(ast.alias(name, asname), like)


def _modules_in(folder: Path) -> set[str]:
    """Return the names by which modules and packages in a folder are imported."""
    found: set[str] = set()
    try:
        entries = list(folder.iterdir())
    except OSError:  # a folder whose files can be read and not listed
        return found
    for entry in entries:
        if entry.suffix in (".py", ".so") or (entry.is_dir() and next(entry.rglob("*.py"), None) is not None):
            found.add(entry.name.partition(".")[0])
    return found
