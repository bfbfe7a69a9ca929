"""`opforge ls ops|kernels --suite custom_ops`: operators of the user's own."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from opforge.cli.progress import ProgressLine

SUITE = "custom_ops"


def list_custom_ops(kind: str, root: Path, ops: str, device: str) -> None:
    """List operators with the cases that they have, or kernels with their references."""
    names = tuple(filter(None, (name.strip() for name in ops.split(","))))
    if kind == "kernels":
        _kernels(root, names)
    else:
        _operators(root, names, device)


def _kernels(root: Path, names: tuple[str, ...]) -> None:
    from opforge.kernels.custom_folder import find_custom_ops

    custom_ops = find_custom_ops(root)
    for op in custom_ops.select(names or custom_ops.folders):
        folder = custom_ops.folders[op]
        for kernel in folder.kernels:
            _line(f"{kernel.name:32} {Path(kernel.file or '').name:32} compared with {folder.reference.name}")
        if not folder.kernels:
            _line(f"{op} has no implementation {op}_NAME.py: there is nothing to judge")
        for warning in folder.warnings if folder.kernels else ():
            _line(f"note: {warning}")
    for reason in custom_ops.skipped:
        _line(f"ignored: {reason}")


def _operators(root: Path, names: tuple[str, ...], device: str) -> None:
    from opforge.kernels.custom_folder import find_custom_ops
    from opforge.runs import RunConfig
    from opforge.runs.pipeline import load_cases
    from opforge.suites.custom_ops import CustomOpsSuite

    config = RunConfig(SUITE, SUITE, ops=names, device=device, custom_ops_root=str(root)).checked()
    folders = find_custom_ops(root).folders
    with ProgressLine() as progress:
        loaded = load_cases(config, CustomOpsSuite(), progress)
    for op, cases in loaded.cases.items():
        count = Counter(case.phase.value for case in cases if not case.lost)
        kernels = len(folders[op].kernels)
        _line(
            f"{op:24} {count['correctness']:4} cases for correctness, {count['performance']:4} for performance, "
            f"{kernels} implementation{'' if kernels == 1 else 's'} compared with {folders[op].reference.name}"
        )
    for loss in loaded.losses:
        _line(f"lost: {loss}")


def _line(text: str) -> None:
    sys.stdout.write(text + "\n")
