"""Import a kernel's file and the modules beside it, always from source.

They become modules of a package with a unique name and the kernel's folder as its path. Imports
among them are made relative to that package when they are compiled. So they cannot clash with
modules of the program or of another kernel.
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

_PACKAGE_PREFIX = "opforge_kernel_"
_GLOBAL_MODULES = sys.stdlib_module_names | {"__main__", "numpy", "opforge", "torch", "triton"}
"""Modules that are always imported globally, whatever lies beside a kernel."""
_UNUSED_BINDING = "_imported_from_beside"
"""Name for a submodule that is only to be loaded: ``import a.b`` binds only ``a``."""


def load_file(file: Path) -> ModuleType:
    """Load a kernel's file as a module, together with the modules it imports from beside it.

    All are read again from disk. Exceptions propagate.
    """
    stem = file.stem.replace(".", "_")  # a dot would make it a module of another package
    package = f"{_PACKAGE_PREFIX}{hashlib.sha256(os.fsencode(file.parent)).hexdigest()[:12]}_{stem}"
    name = f"{package}.{stem}"
    unload_package(package)
    if not any(isinstance(finder, _KernelModuleFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _KernelModuleFinder())
    package_module = ModuleType(package)
    package_module.__path__ = [str(file.parent)]
    package_module.__spec__ = ModuleSpec(package, None, is_package=True)
    sys.modules[package] = package_module
    loader = _RecompilingLoader(name, str(file))  # not the finder: it lists the folder, which may be forbidden
    spec = ModuleSpec(name, loader, origin=str(file))
    spec.has_location = True
    module = sys.modules[name] = module_from_spec(spec)
    try:
        loader.exec_module(module)
    except BaseException:
        unload_package(package)
        raise
    setattr(package_module, stem, module)
    return module


def unload_package(package: str) -> None:
    """Remove a package and its modules from ``sys.modules``."""
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]


class _KernelModuleFinder(MetaPathFinder):
    """Finds the modules of kernels' packages, and nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is None or not fullname.startswith(_PACKAGE_PREFIX):
            return None
        for place in path:
            finder = FileFinder(place, (ExtensionFileLoader, EXTENSION_SUFFIXES), (_RecompilingLoader, SOURCE_SUFFIXES))
            if (spec := finder.find_spec(fullname, target)) is not None:
                return spec
        return None


class _RecompilingLoader(SourceFileLoader):
    """Compiles a module anew.

    Cached bytecode is matched by whole seconds and length, so it may belong to another source.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        package = fullname if self.is_package(fullname) else fullname.rpartition(".")[0]
        root, *subpackages = package.split(".")
        folder = Path(sys.modules[root].__path__[0])
        tree = _RelativeImports(_modules_in(folder) - _GLOBAL_MODULES, 1 + len(subpackages)).visit(
            ast.parse(self.get_data(path), path)
        )
        code: CodeType = self.source_to_code(tree, path)
        return code


class _RelativeImports(ast.NodeTransformer):
    """Makes imports of the named modules relative, ``level`` levels up."""

    def __init__(self, names: set[str], level: int) -> None:
        self._names = names
        self._level = level

    def visit_Import(self, node: ast.Import) -> Any:
        return [ast.copy_location(new, node) for alias in node.names for new in self._relative_imports(alias)]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        if not node.level and (node.module or "").partition(".")[0] in self._names:
            node.level = self._level
        return node

    def _relative_imports(self, alias: ast.alias) -> Iterator[ast.stmt]:
        within, _, last = alias.name.rpartition(".")
        top = alias.name.partition(".")[0]
        if top not in self._names:
            yield ast.Import([alias])
            return
        if within:
            yield ast.ImportFrom(within, [_alias(alias, last, alias.asname or _UNUSED_BINDING)], self._level)
        if not within or not alias.asname:
            yield ast.ImportFrom(None, [_alias(alias, top, alias.asname)], self._level)


def _alias(like: ast.alias, name: str, asname: str | None) -> ast.alias:
    return ast.copy_location(ast.alias(name, asname), like)


def _modules_in(folder: Path) -> set[str]:
    """Return the names of importable modules and packages in a folder."""
    names: set[str] = set()
    try:
        entries = list(folder.iterdir())
    except OSError:  # its files may still be readable
        return names
    for entry in entries:
        if entry.suffix in (".py", ".so") or (entry.is_dir() and next(entry.rglob("*.py"), None) is not None):
            names.add(entry.name.partition(".")[0])
    return names
