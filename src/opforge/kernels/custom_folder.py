"""A folder of custom operators, found by file name.

Each has ``{op}/gen_input.py``, ``{op}_reference.py`` and implementations ``{op}_{name}.py``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from opforge.errors import NothingToJudgeError, OpforgeError, UnknownNameError
from opforge.kernels import native
from opforge.kernels.kernel import Kernel, Reference, ServedOperator
from opforge.kernels.source import digest, printable, why_unusable, with_resolved_folder
from opforge.runtime import untrusted_files

GEN_INPUT = "gen_input.py"
_KERNEL_SUFFIXES = (".py", *native.SUFFIXES)


@dataclass
class CustomFolder:
    """The files of one custom operator."""

    path: Path
    warnings: list[str] = field(default_factory=list)
    """Warnings about its reference, filled when that is first used."""

    @property
    def op(self) -> str:
        return self.path.name

    @property
    def gen_input(self) -> Path:
        return self.path / GEN_INPUT

    @cached_property
    def implementations(self) -> list[Path]:
        """Files of its implementations, sorted by name."""
        candidates = (p for p in self.path.iterdir() if p.suffix in _KERNEL_SUFFIXES and not p.is_dir())
        return sorted(p for p in candidates if _implementation_name(p, self.op) not in ("", "reference"))

    @property
    def entry(self) -> str:
        return f"{self.op}_kernel_impl"

    @cached_property
    def reference(self) -> Reference:
        """Baseline of its kernels: ``{op}_reference``, an implementation, or else the identity."""
        reference_file = self.path / f"{self.op}_reference.py"
        if untrusted_files.is_regular(reference_file):
            if _defines(reference_file, f"{self.op}_reference", broken=True):
                return _reference(reference_file.stem, reference_file, f"{self.op}_reference")
            self.warnings.append(
                f"{self.op}: {reference_file.name} does not define {self.op}_reference, and is ignored"
            )
        for file, name in sorted(self._named(), key=lambda implementation: native.is_native(implementation[0])):
            if _defines(file, self.entry, broken=False):
                self.warnings.append(
                    f"{self.op} has no reference: {name} is used instead, and is itself compared with nothing else"
                )
                return _reference(name, file, self.entry)
        self.warnings.append(
            f"{self.op} has neither a reference nor an implementation that defines {self.entry}: the identity is its "
            "reference"
        )
        return Reference("the identity")

    @cached_property
    def kernels(self) -> list[Kernel]:
        """A kernel for each implementation, named ``{op}__{name}``."""
        return [self._kernel(file, name) for file, name in self._named()]

    def _kernel(self, file: Path, name: str) -> Kernel:
        path, broken = str(with_resolved_folder(file)), why_unusable(file)
        return Kernel(
            printable(name),
            self.op,
            (ServedOperator(self.op),),
            printable(path) if broken else path,
            (self.entry,),
            digest(file),
            reference=self.reference,
            broken=broken,
        )

    def _named(self) -> Iterable[tuple[Path, str]]:
        """Yield the implementations with their kernel names.

        The suffix is added where two differ only in it.
        """
        stems = [p.stem for p in self.implementations]
        for file in self.implementations:
            name = f"{self.op}__{_implementation_name(file, self.op)}"
            yield file, name if stems.count(file.stem) == 1 else f"{name}{file.suffix}"


@dataclass(frozen=True)
class CustomOps:
    """All operators under a root."""

    root: Path
    folders: dict[str, CustomFolder]
    skipped: tuple[str, ...]
    """Messages about folders that hold no operator."""

    def select(self, names: Iterable[str]) -> list[str]:
        """Return the operators selected by ``--ops``."""
        for name in names:
            if name not in self.folders:
                hint = f"see `opforge ls ops --suite custom_ops --custom-ops-root {self.root}`"
                raise UnknownNameError("custom operator", name, self.folders, hint)
        return list(dict.fromkeys(names))


def find_custom_ops(root: Path) -> CustomOps:
    """Return the custom operators under a root; if none, raises with the expected layout."""
    if not root.is_dir():
        raise OpforgeError(
            f"there is no folder {str(root)!r} of custom operators; name it with --custom-ops-root. "
            f"It holds a folder for each: {{op}}/{GEN_INPUT} and {{op}}/{{op}}_NAME.py"
        )
    folders: dict[str, CustomFolder] = {}
    skipped = []
    for path in sorted(
        p for p in root.iterdir() if untrusted_files.is_folder(p) and not p.name.startswith((".", "__"))
    ):
        folder = CustomFolder(path)
        if not path.name.isidentifier():
            skipped.append(f"{path.name} cannot be the name of an operator: its functions are named after it")
        elif not untrusted_files.is_regular(folder.gen_input) and not folder.implementations:
            skipped.append(f"{path.name} holds neither {GEN_INPUT} nor {path.name}_NAME.py")
        else:
            folders[path.name] = folder
    if not folders:
        raise NothingToJudgeError(
            f"no custom operator in {str(root)!r}: expected {{op}}/{GEN_INPUT} and {{op}}/{{op}}_NAME.py"
            + "".join(f"; {reason}" for reason in skipped)
        )
    return CustomOps(root, folders, tuple(skipped))


def _implementation_name(file: Path, op: str) -> str:
    """Return NAME of ``{op}_NAME.py``; empty for any other file name."""
    return file.stem.removeprefix(f"{op}_") if file.stem.startswith(f"{op}_") else ""


def _reference(name: str, file: Path, entry: str) -> Reference:
    return Reference(
        printable(name), str(with_resolved_folder(file)), (entry,), digest(file), broken=why_unusable(file)
    )


def _defines(file: Path, name: str, *, broken: bool) -> bool:
    """Whether a source seems to define a name, without running it.

    ``broken`` is the answer for a source that cannot be read or parsed.
    """
    try:
        source = untrusted_files.read_text(file)
        return native.is_native(file) or name in _bound_names(ast.parse(source)) or "import *" in source
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return broken


def _bound_names(tree: ast.AST) -> set[str]:
    """Return the names that a module's statements bind, except inside functions and classes."""
    names: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        else:
            names |= _bound_names(node)
    return names
