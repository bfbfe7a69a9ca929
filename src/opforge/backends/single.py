"""One kernel as a backend: from a file, from a folder with one file, or ATen's own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from opforge.backends.aten import AtenBackend
from opforge.backends.base import BackendOptions
from opforge.backends.directory import implementation_files, kernel_from_file, operator_of_folder
from opforge.errors import NothingToJudgeError, OpforgeError
from opforge.kernels import Kernel, ServedOperator
from opforge.kernels.native import is_native
from opforge.ops import table
from opforge.runtime.operator_names import strip_namespace

_ATEN_PREFIX = "aten:"
_FILE_INFIX = "_implementation_"


class SingleBackend:
    """One kernel that serves one operator."""

    name = "kernel"

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.op = kernel.serves[0].op

    def kernels(self, ops: Iterable[str]) -> list[Kernel]:
        return [self.kernel] if self.op in set(ops) else []

    @classmethod
    def from_argument(cls, location: str, op: str | None = None) -> SingleBackend:
        """Return the kernel in a file or a folder with one file, or ``aten:OP``, for one operator.

        The kernel's name gives the operator; ``op`` can choose another overload or form it serves.
        """
        if location.startswith(_ATEN_PREFIX):
            return cls(_of_aten(location.removeprefix(_ATEN_PREFIX), op))
        file = _file(location)
        name = _name(file, op)
        kernel = kernel_from_file(file, name)
        op_name = table().resolve(op or name).name
        if all(served.op != op_name for served in kernel.serves):
            served_names = ", ".join(served.op for served in kernel.serves)
            raise OpforgeError(
                f"--op {op} ({op_name}) is not one of the operators that {file.name} is named for: {served_names}"
            )
        return cls(replace(kernel, serves=(ServedOperator(op_name),)))


def _of_aten(name: str, op: str | None) -> Kernel:
    if op is not None:
        raise OpforgeError(f"--op cannot be combined with {_ATEN_PREFIX}{name}, which already names the operator")
    (kernel,) = AtenBackend(BackendOptions()).kernels([table().resolve(name).name])
    return kernel


def _file(location: str) -> Path:
    """Return the kernel's file; a folder must hold exactly one."""
    path = Path(location)
    if path.is_file():
        if path.suffix != ".py" and not is_native(path):
            raise OpforgeError(
                f"{location!r} is not a kernel: a kernel is a Python file, or C++ (.cpp) or CUDA (.cu) source"
            )
        return path
    if not path.is_dir():
        raise OpforgeError(
            f"there is no kernel {location!r}: no such file or folder; give a file such as "
            f"kernels/relu/relu_implementation_1.py, its folder, or {_ATEN_PREFIX}relu for ATen's own"
        )
    files = implementation_files(path.resolve())
    if len(files) > 1:
        raise OpforgeError(f"several kernels in {location!r}: {', '.join(f.name for f in files)}; name the file of one")
    if not files:
        raise NothingToJudgeError(_no_kernel(path))
    return files[0]


def _no_kernel(folder: Path) -> str:
    kernel_folders = sorted(p.name for p in folder.resolve().iterdir() if p.is_dir() and implementation_files(p))
    if kernel_folders:
        return f"{str(folder)!r} is a folder of kernel folders: {', '.join(kernel_folders)}; name one of them"
    name = folder.resolve().name
    return f"no kernel in {str(folder)!r}: expected {name}{_FILE_INFIX}1.py, or name the file"


def _name(file: Path, op: str | None) -> str:
    """Return a kernel's operator, from its file name or else from ``--op``."""
    name, infix, _ = file.stem.partition(_FILE_INFIX)
    if infix:
        return operator_of_folder(name)
    if op is None:
        raise OpforgeError(
            f"{file.name!r} does not name its operator; name it OP{_FILE_INFIX}1.py, or give the operator with --op"
        )
    return strip_namespace(op)
