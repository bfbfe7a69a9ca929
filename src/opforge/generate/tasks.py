"""Tasks for a model: the kernel to write, for an ATen operator or a user's own, and its cases."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from opforge.backends.directory import implementation_files, kernel_from_file, operator_of_folder
from opforge.cases import Case, Phase
from opforge.errors import NothingToJudgeError, OpforgeError
from opforge.generate.companion_files import CompanionFiles
from opforge.kernels import Kernel, ServedOperator
from opforge.kernels.custom_folder import CustomFolder, CustomOps
from opforge.kernels.native import is_native
from opforge.kernels.source import digest
from opforge.ops import Operator, table
from opforge.runs.plan import Job, OperatorCases
from opforge.suites import LoadedSuite

_STORAGE_LOCATION = re.compile(r", (?:at|nbytes)=\d+")
"""Position and size of a tensor's stored contents; they say nothing about the call."""
_MAX_CALL_CHARS = 240


@dataclass(frozen=True, slots=True)
class AtenTask:
    """A kernel to be written for an ATen operator.

    ``name`` is the name of its folder in a kernel directory.
    """

    name: str
    operator: Operator
    parts: tuple[OperatorCases, ...]

    @property
    def entry(self) -> str:
        """Function that the kernel file must define."""
        return f"{self.operator.base}_kernel_impl"

    @property
    def authority(self) -> str:
        """Source of the expected results, as verdicts name it."""
        return self.operator.reference_name

    def job(self, file: Path, name: str) -> Job:
        """Return the job that judges the kernel in a file, under the given kernel name."""
        kernel = kernel_from_file(file, self.name)
        parts = {part.op for part in self.parts}
        serves = tuple(served for served in kernel.serves if served.op in parts)
        return Job(replace(kernel, name=name, serves=serves), self.parts)

    def kernel(self, file: Path) -> Kernel:
        """Return the kernel in a kept file, with the name that a run gives it."""
        return kernel_from_file(file, operator_of_folder(self.name))

    def next_file(self, root: Path, suffix: str) -> Path:
        """Return the file of the next implementation in the kernel's folder."""
        folder = root.resolve() / self.name
        taken = [file.stem.rpartition("_")[2] for file in implementation_files(folder)] if folder.is_dir() else []
        return folder / f"{self.name}_implementation_{next_number(taken)}{suffix}"

    def write_companions(self, root: Path) -> None:
        """Do nothing: a kernel is judged against ATen, which needs no files."""


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


def is_timed(parts: Iterable[OperatorCases]) -> bool:
    """Whether any case of a kernel is timed."""
    return any(case.phase is Phase.PERFORMANCE for part in parts for case in part.cases)


def next_number(taken: Iterable[str]) -> int:
    """Return one more than the largest number among the words; other words are ignored."""
    return max((int(word) for word in taken if word.isdecimal()), default=0) + 1


def aten_tasks(suite: LoadedSuite) -> list[AtenTask]:
    """Return the kernels to write for a suite: one per packet, for all overloads and variants."""
    names = dict.fromkeys(table().folder_of(op) for name in suite.cases if (op := table().get(name)) is not None)
    if not names:
        raise NothingToJudgeError(
            f"the operators of suite {suite.name!r} are neither ATen's nor those of --custom-ops-root; "
            "language models write kernels for these only: see `opforge ls suites`"
        )
    kernels_to_write, served_ops = [], set[str]()
    for name in names:
        parts = tuple(part for part in _parts(name, suite) if part.op not in served_ops)
        served_ops |= {part.op for part in parts}
        if parts:
            kernels_to_write.append(AtenTask(name, table().resolve(name), parts))
    return kernels_to_write


def _parts(name: str, suite: LoadedSuite) -> Iterable[OperatorCases]:
    for served in kernel_from_file(Path(name), name).serves:
        if cases := suite.cases.get(served.op):
            yield OperatorCases(served.op, served.required, cases)


@dataclass
class CustomTasks:
    """Operators of a root that need kernels, and messages about them."""

    tasks: list[CustomTask] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def custom_tasks(custom_ops: CustomOps, suite: LoadedSuite, backend_name: str, kernel_root: Path) -> CustomTasks:
    """Return the tasks for the operators of a suite.

    Operators for which right and wrong kernels cannot be told apart are skipped with a remark.
    ``kernel_root`` is the folder for right kernels. Files there that differ from those that kernels
    are judged with are an error.
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
        return (
            "it has neither a reference nor an implementation to compare a kernel with; "
            f"write {reference_name} with {folder.op}_reference"
        )
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
                f"kernels cannot go to {str(into)!r}: {folder.op} has no reference of its own, "
                f"and they would be used as its reference; write {folder.op}_reference.py, "
                "or name another folder with --ops-directory"
            )
    elif others := companions.conflicts_in(into):
        raise OpforgeError(
            f"kernels cannot go to {str(into)!r}: {others[0]} there differs from the one in {str(folder.path)!r}, "
            "with which they are judged; name another folder with --ops-directory"
        )


def sample_cases(cases: Sequence[Case], max_cases: int) -> list[Case]:
    """Return up to ``max_cases`` cases with distinct calls, spread from the shortest to the longest."""
    by_call = {call_text(case): case for case in cases}
    ordered = sorted(by_call.values(), key=lambda case: (len(case.args), case.args))
    if len(ordered) <= max_cases:
        return ordered
    step = (len(ordered) - 1) / (max_cases - 1) if max_cases > 1 else 0
    return [ordered[round(number * step)] for number in range(max_cases)]


def call_text(case: Case) -> str:
    """Return a case's call as text."""
    return without_storage(case.args)


def without_storage(call: str) -> str:
    """Return the text of a call without storage positions, cut to a maximum length."""
    text = _STORAGE_LOCATION.sub("", call)
    return text if len(text) <= _MAX_CALL_CHARS else text[:_MAX_CALL_CHARS] + " …"
