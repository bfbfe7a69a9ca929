"""Create an operator folder: registration, kernels, bindings, a model and tests. Needs no torch."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from opforge.edge.bindings import RUNTIME_NAMESPACES
from opforge.edge.toolchain import templates
from opforge.errors import OpforgeError
from opforge.kernels.native.builder import checked_namespace
from opforge.package.names import check_operator_name

_FILES = ("ops.py", "ops.yaml", "model.py", "tests/test_ops.py", "README.md")
_FIRST_FACTOR = 3


def make_folder(folder: Path, namespace: str, ops: Sequence[str]) -> tuple[Path, ...]:
    """Create an operator folder, all or nothing, and return its files."""
    _refuse_names(namespace, ops)
    return write_folder(folder, _texts(folder.name, namespace, ops))


def _refuse_names(namespace: str, ops: Sequence[str]) -> None:
    checked_namespace(namespace)
    if namespace in RUNTIME_NAMESPACES or namespace in ("torch", "executorch", "std"):
        raise OpforgeError(f"namespace {namespace!r} is ExecuTorch's or torch's own; choose another with --namespace")
    if not ops:
        raise OpforgeError("there is no operator to make; name one with --op, such as --op mul3")
    for name in ops:
        check_operator_name(name)
        if name in ("define", "model", "dynamic", "cases", "inputs"):
            raise OpforgeError(f"operator {name!r} is a name that the folder's files use themselves; choose another")
    if double := [name for name in ops if ops.count(name) > 1]:
        raise OpforgeError(f"operator {double[0]!r} is named twice")


def _texts(name: str, namespace: str, ops: Sequence[str]) -> dict[str, str]:
    environment = templates("folder")
    rows = [{"name": op, "factor": _factor(op, _FIRST_FACTOR + number)} for number, op in enumerate(ops)]
    library = re.sub(r"\W", "_", name) + "_kernels"
    texts = {
        file: environment.get_template(f"{file}.j2").render(namespace=namespace, ops=rows, library=library)
        for file in _FILES
    }
    kernel = environment.get_template("kernels/op.cpp.j2")
    return texts | {f"kernels/{row['name']}.cpp": kernel.render(namespace=namespace, op=row) for row in rows}


def _factor(op: str, default: int) -> int:
    """Return the factor of an operator's placeholder kernel: 7 for mul7."""
    match = re.fullmatch(r"mul(\d{1,2})", op)
    return int(match[1]) if match else default


def write_folder(folder: Path, texts: Mapping[str, str]) -> tuple[Path, ...]:
    """Create a folder with these files, and return their relative paths. Overwrites nothing."""
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise OpforgeError(f"{str(folder)!r} is there already and not an empty folder; choose another")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
            draft = Path(temporary) / "made"
            for name, text in texts.items():
                (draft / name).parent.mkdir(parents=True, exist_ok=True)
                (draft / name).write_text(text)
            draft.rename(folder)  # replaces at most an empty folder
    except OSError as error:
        raise OpforgeError(f"folder {str(folder)!r} cannot be made: {error.strerror}") from None
    return tuple(sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file()))
