"""Insert lines into a package's Python files, located by parsing, so the author's lines stay."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from opforge.errors import OpforgeError

_MAX_LINE_COLUMNS = 120


def fold_line(head: str, parts: Sequence[str], tail: str, indent: int = 0, comment: str = "") -> str:
    """Join head, parts and tail on one line, or fold them as the formatter would.

    The comment follows the line, or the head if folded.
    """
    space = " " * indent
    if len(line := f"{space}{head}{', '.join(parts)}{tail}") <= _MAX_LINE_COLUMNS:
        return line + comment
    inner = f"{space}    {', '.join(parts)}"
    if len(inner) > _MAX_LINE_COLUMNS or head.endswith(("[", "{")):
        inner = ",\n".join(f"{space}    {part}" for part in parts) + ","
    return f"{space}{head}{comment}\n{inner}\n{space}{tail}"


def with_export(text: str, path: str, op: str) -> str:
    """Add the operator's import and ``__all__`` entry to the text of ``ops/__init__.py``."""
    return _with_all_entry(_with_import(text, path, op), path, op)


def _with_import(text: str, path: str, op: str) -> str:
    """Add the operator's import in alphabetical order among the relative imports."""
    body = _parse(text, path).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module]
    if any(node.module == op for node in imports):
        return text
    earlier = [node for node in imports if str(node.module) < op]
    docstring = body[:1] if body and isinstance(body[0], ast.Expr) else []
    before = earlier[-1:] or ([] if imports else docstring)
    line_number = (before[0].end_lineno or 0) if before else imports[0].lineno - 1 if imports else 0
    return _insert_line(text, line_number, f"from .{op} import {op}")


def _with_all_entry(text: str, path: str, op: str) -> str:
    """Add the operator to the list ``__all__``; a sorted list stays sorted."""
    assignments = [node for node in _parse(text, path).body if isinstance(node, ast.Assign) and _assigns_all(node)]
    if len(assignments) != 1 or not isinstance(assignments[0].value, ast.List | ast.Tuple):
        raise OpforgeError(
            f'{path} has no list of its exports; write one, such as __all__ = ["swiglu"], and run this again'
        )
    try:
        names = list(ast.literal_eval(assignments[0].value))
    except ValueError:
        raise OpforgeError(
            f"__all__ in {path} is not a plain list of names; add {op!r} to it yourself, and run this again"
        ) from None
    if op in names:
        return text
    extended_names = sorted([*names, op]) if names == sorted(names) else [*names, op]
    lines = text.splitlines()
    lines[assignments[0].lineno - 1 : assignments[0].end_lineno] = [
        fold_line("__all__ = [", [f'"{name}"' for name in extended_names], "]")
    ]
    return "\n".join(lines) + "\n"


def _assigns_all(node: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)


def with_method(text: str, path: str, op: str, parameters: Sequence[str], returns: str) -> str:
    """Add a method for the operator to the class Namespace in the text of ``namespace.py``."""
    classes = [n for n in _parse(text, path).body if isinstance(n, ast.ClassDef) and n.name == "Namespace"]
    if not classes:
        raise OpforgeError(f"{path} has no class Namespace for {op}; write one as a typing.Protocol")
    if any(isinstance(node, ast.FunctionDef) and node.name == op for node in classes[0].body):
        return text
    line = fold_line(f"def {op}(", ["self", *parameters], f") -> {returns}: ...", 4)
    return _insert_line(text, classes[0].end_lineno or 0, line)


def _insert_line(text: str, line_number: int, line: str) -> str:
    lines = text.splitlines()
    return "\n".join([*lines[:line_number], line, *lines[line_number:]]) + "\n"


def _parse(text: str, path: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise OpforgeError(
            f"{path} is not Python, line {error.lineno}: {error.msg}; fix it, and run this again"
        ) from None
