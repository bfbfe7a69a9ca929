"""What a kernel is made of: its file, and the modules beside it that it imports."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path

from opforge.kernels import native


def digest(file: Path) -> str:
    """Return the digest of a source with what it imports from beside it; one that cannot be read has none, and its load is its verdict."""
    try:
        if native.is_native(file):
            return native.digest(file)
        whole = hashlib.sha256(file.read_bytes())
        for other in sorted(_beside(file)):
            whole.update(str(other.relative_to(file.parent)).encode() + b"\0" + other.read_bytes())
    except OSError:
        return "unreadable"
    return whole.hexdigest()[:16]


def imports(text: str) -> Iterator[str]:
    """Yield the first parts of the names of the modules that a source imports; none where it cannot be parsed."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def _beside(file: Path) -> set[Path]:
    """Return the modules in a file's folder that it imports, directly or through each other."""
    found: set[Path] = set()
    new = {file}
    while new:
        names = {name for source in new for name in imports(source.read_text(encoding="utf-8", errors="replace"))}
        there = {module for name in names for module in _module(file.parent, name)}
        new = there - found - {file}
        found |= new
    return found


def _module(folder: Path, name: str) -> Iterator[Path]:
    """Yield the files of a module that lies in a folder; none where there is no such module."""
    if (module := folder / f"{name}.py").is_file():
        yield module
    if (package := folder / name).is_dir():
        yield from package.rglob("*.py")
