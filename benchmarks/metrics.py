"""Print size and complexity of a checkout's source tree beside the targets: ``python benchmarks/metrics.py [ROOT]``."""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEMPLATES = "template"
"""A folder with this name holds files of packages that opforge makes."""
MAX_PARAMETERS, MAX_IMPORTS, MAX_COLUMNS = 7, 10, 120
BROAD = {"Exception", "BaseException"}


@dataclass(frozen=True)
class Module:
    """A Python file."""

    name: str
    lines: list[str]

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse("\n".join(self.lines))))

    @property
    def classes(self) -> Iterator[str]:
        """Yield the names of classes; ``_Job`` and ``Job`` are one name."""
        return (node.name.lstrip("_") for node in self.nodes if isinstance(node, ast.ClassDef))

    @property
    def broad_excepts(self) -> int:
        handlers = (node for node in self.nodes if isinstance(node, ast.ExceptHandler))
        return sum(handler.type is None or _is_broad(handler.type) for handler in handlers)

    @property
    def broad_suppressions(self) -> int:
        calls = (node for node in self.nodes if isinstance(node, ast.Call))
        return sum(ast.unparse(c.func).endswith("suppress") and any(map(_is_broad, c.args)) for c in calls)

    @property
    def wide_functions(self) -> Iterator[str]:
        """Yield the functions with too many parameters; ``self`` and ``cls`` do not count."""
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                if len([name for name in names if name not in ("self", "cls")]) > MAX_PARAMETERS:
                    yield f"{self.name}.{node.name}"

    def imported(self, known: set[str]) -> set[str]:
        """Return which of the known modules this one imports, in functions too."""
        found: set[str] = set()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
                inside = {f"{node.module}.{alias.name}" for alias in node.names} & known
                found |= inside or {node.module}
        return (found & known) - {self.name}


def _is_broad(node: ast.expr) -> bool:
    return any(isinstance(n, ast.Name) and n.id in BROAD for n in ast.walk(node))


def modules(folder: Path) -> list[Module]:
    """Return the Python files under a folder, without templates."""
    files = (path for path in folder.rglob("*.py") if TEMPLATES not in path.relative_to(folder).parts)
    named = ((path, ".".join(path.relative_to(folder.parent).with_suffix("").parts)) for path in files)
    return [Module(name.removesuffix(".__init__"), path.read_text().splitlines()) for path, name in named]


def repeated(names: Iterator[str]) -> int:
    """Count the names that occur more than once."""
    return sum(count > 1 for count in Counter(names).values())


def rows(source: list[Module], tests: list[Module]) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and target of each metric."""
    lines = sum(len(m.lines) for m in source)
    untyped = sum(line.count("dict[str, Any]") for m in source for line in m.lines)
    known = {m.name for m in source}
    packages = {m.name.rpartition(".")[0] for m in source}
    stems = (m.name.rpartition(".")[2] for m in source if m.name not in packages)
    classes = (name for m in source for name in m.classes)
    yield "modules / lines (without templates)", f"{len(source)} / {lines:,}", "≤ 280 / ≤ 39,000"
    yield "`dict[str, Any]` per 1,000 lines", f"{1000 * untyped / lines:.1f} ({untyped})", "≤ 5 (200)"
    broad = f"{sum(m.broad_excepts for m in source)} (and {sum(m.broad_suppressions for m in source)} `suppress`)"
    yield "broad excepts", broad, "≤ 35, each with a reason"
    many = sum(len(m.imported(known)) > MAX_IMPORTS for m in source)
    yield f"modules importing more than {MAX_IMPORTS} of our own", str(many), "≤ 12"
    yield "module / class names used more than once", f"{repeated(stems)} / {repeated(classes)}", "same meaning only"
    wide = sum(len(list(m.wide_functions)) for m in source)
    yield f"functions with more than {MAX_PARAMETERS} parameters", str(wide), "≤ 5"
    long = sum(len(line) > MAX_COLUMNS for m in source for line in m.lines)
    yield f"lines over {MAX_COLUMNS} columns", str(long), "0"
    yield "tests : source", f"{sum(len(m.lines) for m in tests) / lines:.2f}", "≥ 0.7"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT)
    root: Path = parser.parse_args().root
    print("| | now | target |\n|---|---|---|")
    for name, value, target in rows(modules(root / "src" / "opforge"), modules(root / "tests")):
        print(f"| {name} | {value} | {target} |")


if __name__ == "__main__":
    main()
