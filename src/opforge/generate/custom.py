"""Assignments for operators outside ATen: kernels judged against the user's reference."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path

from opforge.errors import OpforgeError
from opforge.generate.assignment import Assignment, next_number
from opforge.generate.companions import Companions
from opforge.kernels import Kernel, Served
from opforge.kernels.custom import CustomFolder, CustomOps
from opforge.kernels.native import is_native
from opforge.kernels.source import digest
from opforge.runs.plan import Job, Part
from opforge.suites import LoadedSuite


@dataclass(frozen=True, slots=True)
class CustomAssignment:
    """A kernel to be written for one of the user's operators."""

    folder: CustomFolder
    parts: tuple[Part, ...]
    label: str
    """Name of the backend that writes it; the file is ``{op}_{label}_1.py``."""
    companions: Companions

    @property
    def name(self) -> str:
        return self.folder.op

    @property
    def entry(self) -> str:
        return self.folder.entry

    @property
    def authority(self) -> str:
        return "the reference"

    @property
    def sources(self) -> dict[str, str]:
        """The reference and the modules beside it that it imports, by name."""
        return self.companions.shown

    @property
    def signature(self) -> str:
        """Parameters of the reference as Python source; empty if the source does not show them."""
        entries = self.folder.reference.entries
        for node in ast.walk(ast.parse(next(iter(self.sources.values())))):
            if isinstance(node, ast.FunctionDef) and node.name in entries:
                return ast.unparse(node.args)
        return ""

    def job(self, file: Path, name: str) -> Job:
        return Job(self._kernel(file, name), self.parts)

    def kernel(self, file: Path) -> Kernel:
        """Return the kernel in a file, named ``{op}__{label}_1``."""
        return self._kernel(file, f"{self.name}__{file.stem.removeprefix(f'{self.name}_')}")

    def next_file(self, root: Path, suffix: str) -> Path:
        """Return an unused file in the operator's folder under a root."""
        folder = root.resolve() / self.name
        prefix = f"{self.name}_{self.label}_"
        stems = [file.stem for file in folder.iterdir()] if folder.is_dir() else []
        number = next_number(stem.removeprefix(prefix) for stem in stems if stem.startswith(prefix))
        return folder / f"{prefix}{number}{suffix}"

    def lay_out(self, root: Path) -> None:
        """Copy the operator's cases and reference into its folder under a root.

        The root then is a valid root of custom operators.
        """
        if (root / self.name).resolve() != self.folder.path.resolve():
            self.companions.copy_to(root / self.name)

    def _kernel(self, file: Path, name: str) -> Kernel:
        reference = self.folder.reference
        served = (Served(self.name),)
        return Kernel(name, self.name, served, str(file.resolve()), (self.entry,), digest(file), reference=reference)


Task = Assignment | CustomAssignment
"""A kernel to be written, for an ATen operator or a user's own."""


@dataclass
class CustomWork:
    """Operators of a root that need kernels, and messages about them."""

    tasks: list[CustomAssignment] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def custom_work(found: CustomOps, suite: LoadedSuite, label: str, into: Path) -> CustomWork:
    """Return the assignments for the operators of a suite.

    Operators for which right and wrong kernels cannot be told apart are skipped with a remark.
    ``into`` is the folder for right kernels. Files there that differ from those that kernels are
    judged with are an error.
    """
    work = CustomWork()
    for op, cases in suite.cases.items():
        folder = found.folders[op]
        part = Part(op, required=True, cases=[case for case in cases if not case.lost])
        if reason := _why_unjudgeable(folder, part):
            work.remarks.append(f"{op} is passed over, and no model was asked: {reason}")
            continue
        companions = Companions.of(folder)
        _check_target_folder(folder, companions, into / op)
        work.tasks.append(CustomAssignment(folder, (part,), label, companions))
        work.remarks += folder.warnings
    return work


def _why_unjudgeable(folder: CustomFolder, part: Part) -> str:
    """Return why no kernel can be judged; empty if one can."""
    reference_name = f"{folder.op}_reference.py"
    file = folder.reference.file
    if file is None:
        return f"it has neither a reference nor an implementation to hold a kernel against; write {reference_name} with {folder.op}_reference"
    if is_native(file):
        return f"its only implementation is {Path(file).name}; a model's kernels are held against Python: write {reference_name} with {folder.op}_reference"
    try:
        ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        return f"{Path(file).name} cannot be read: {error}"
    if not part.cases:
        return f"none of its cases can be made; see what {folder.gen_input.name} is said to lack"
    return ""


def _check_target_folder(folder: CustomFolder, companions: Companions, into: Path) -> None:
    """Raise if kernels would end up beside a reference or cases they were not judged with."""
    if into.resolve() == folder.path.resolve():
        if companions.made:
            raise OpforgeError(
                f"kernels cannot go to {str(into)!r}: {folder.op} has no reference of its own, and they would be taken for it; "
                f"write {folder.op}_reference.py, or name another folder with --ops-directory"
            )
    elif others := companions.others_in(into):
        raise OpforgeError(
            f"kernels cannot go to {str(into)!r}: {others[0]} there is another than in {str(folder.path)!r}, with which they are judged; "
            "name another folder with --ops-directory"
        )
