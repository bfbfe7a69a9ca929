"""Assignments for operators outside ATen: kernels judged against the user's reference."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path

from opforge.errors import OpforgeError
from opforge.generate.companion_files import CompanionFiles
from opforge.generate.tasks import AtenTask, next_number
from opforge.kernels import Kernel, ServedOperator
from opforge.kernels.custom import CustomFolder, CustomOps
from opforge.kernels.native import is_native
from opforge.kernels.source import digest
from opforge.runs.plan import Job, OperatorCases
from opforge.suites import LoadedSuite


@dataclass(frozen=True, slots=True)
class CustomTask:
    """A kernel to be written for one of the user's operators."""

    folder: CustomFolder
    parts: tuple[OperatorCases, ...]
    backend_name: str
    """Name of the backend that writes it; the file is ``{op}_{label}_1.py``."""
    companions: CompanionFiles

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
        return self.companions.reference_sources

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
        prefix = f"{self.name}_{self.backend_name}_"
        stems = [file.stem for file in folder.iterdir()] if folder.is_dir() else []
        number = next_number(stem.removeprefix(prefix) for stem in stems if stem.startswith(prefix))
        return folder / f"{prefix}{number}{suffix}"

    def write_companions(self, root: Path) -> None:
        """Copy the operator's cases and reference into its folder under a root.

        The root then is a valid root of custom operators.
        """
        if (root / self.name).resolve() != self.folder.path.resolve():
            self.companions.copy_to(root / self.name)

    def _kernel(self, file: Path, name: str) -> Kernel:
        reference = self.folder.reference
        served = (ServedOperator(self.name),)
        return Kernel(name, self.name, served, str(file.resolve()), (self.entry,), digest(file), reference=reference)


Task = AtenTask | CustomTask
"""A kernel to be written, for an ATen operator or a user's own."""


@dataclass
class CustomTasks:
    """Operators of a root that need kernels, and messages about them."""

    tasks: list[CustomTask] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def custom_tasks(custom_ops: CustomOps, suite: LoadedSuite, backend_name: str, kernel_root: Path) -> CustomTasks:
    """Return the assignments for the operators of a suite.

    Operators for which right and wrong kernels cannot be told apart are skipped with a remark.
    ``into`` is the folder for right kernels. Files there that differ from those that kernels are
    judged with are an error.
    """
    work = CustomTasks()
    for op, cases in suite.cases.items():
        folder = custom_ops.folders[op]
        part = OperatorCases(op, required=True, cases=[case for case in cases if not case.lost])
        if reason := _why_unjudgeable(folder, part):
            work.remarks.append(f"{op} is skipped: {reason}")
            continue
        companions = CompanionFiles.from_folder(folder)
        _check_target_folder(folder, companions, kernel_root / op)
        work.tasks.append(CustomTask(folder, (part,), backend_name, companions))
        work.remarks += folder.warnings
    return work


def _why_unjudgeable(folder: CustomFolder, part: OperatorCases) -> str:
    """Return why no kernel can be judged; empty if one can."""
    reference_name = f"{folder.op}_reference.py"
    file = folder.reference.file
    if file is None:
        return f"it has neither a reference nor an implementation to compare a kernel with; write {reference_name} with {folder.op}_reference"
    if is_native(file):
        return (
            f"its only implementation is {Path(file).name}; a model's kernels are compared with a Python reference: "
            f"write {reference_name} with {folder.op}_reference"
        )
    try:
        ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        return f"{Path(file).name} cannot be read: {error}"
    if not part.cases:
        return f"none of its cases can be made; see what is missing in {folder.gen_input.name}"
    return ""


def _check_target_folder(folder: CustomFolder, companions: CompanionFiles, into: Path) -> None:
    """Raise if kernels would end up beside a reference or cases they were not judged with."""
    if into.resolve() == folder.path.resolve():
        if companions.generated:
            raise OpforgeError(
                f"kernels cannot go to {str(into)!r}: {folder.op} has no reference of its own, and they would be used as its reference; "
                f"write {folder.op}_reference.py, or name another folder with --ops-directory"
            )
    elif others := companions.conflicts_in(into):
        raise OpforgeError(
            f"kernels cannot go to {str(into)!r}: {others[0]} there differs from the one in {str(folder.path)!r}, with which they are judged; "
            "name another folder with --ops-directory"
        )
