"""`opforge ls`: what there is."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from opforge import registry
from opforge.cases.values import parse_dtype
from opforge.cli import ls_custom_ops
from opforge.cli.progress import ProgressLine
from opforge.errors import UnknownNameError
from opforge.kernels import Kernel
from opforge.suites.base import DEFAULT_DTYPES, LoadedSuite, SuiteOptions
from opforge.suites.lookup import find_suite

_KINDS = ("suites", "backends", "providers", "executors", "ops", "kernels")
_MAX_SHOWN_DTYPES = 4
"""How many dtypes of a proof are named."""


def register(app: typer.Typer) -> None:
    app.command("ls")(ls)


def ls(
    kind: Annotated[str, typer.Argument(help="suites, backends, providers, executors, ops or kernels.")],
    suite: Annotated[
        str,
        typer.Option(help="With `ops`: the operators of a suite, and its coverage; `custom_ops` also lists kernels."),
    ] = "",
    ops: Annotated[str, typer.Option(help="With `ops`: only these.")] = "",
    device: Annotated[str, typer.Option(help="With `--suite`: cpu or cuda.")] = "cpu",
    dtypes: Annotated[str, typer.Option(help="With `--suite`: dtypes of the cases.")] = ",".join(DEFAULT_DTYPES),
    ops_directory: Annotated[Path, typer.Option(help="With `kernels`: the folder.")] = Path("generated_kernels"),
    custom_ops_root: Annotated[
        Path, typer.Option(help="With `--suite custom_ops`: the folder of your own operators.")
    ] = Path("custom_ops"),
) -> int:
    """List suites, backends, providers of language models, executors, operators, or the kernels in a folder."""
    if kind not in _KINDS:
        raise UnknownNameError("kind of list", kind, _KINDS)
    if kind in ("suites", "backends", "providers", "executors"):
        for name in registry.names(kind):
            _line(f"{name:14} {(registry.load(kind, name).__doc__ or '').strip().splitlines()[0]}")
    elif suite == ls_custom_ops.SUITE:
        ls_custom_ops.list_custom_ops(kind, custom_ops_root, ops, device)
    elif kind == "kernels":
        _kernels(ops_directory)
    elif suite:
        _suite(suite, device, tuple(parse_dtype(d) for d in dtypes.split(",")), ops)
    else:
        _operators(ops)
    return 0


def _line(text: str) -> None:
    sys.stdout.write(text + "\n")


def _operators(ops: str) -> None:
    from opforge.ops import table

    chosen = table().select(ops.split(",")) if ops else list(table())
    for op in chosen:
        facts = [op.kind.value, *(["composite"] if op.composite else []), *(["random"] if op.is_random else [])]
        _line(f"{op.name:45} {', '.join(facts):24} {op.schema}")


def _kernels(directory: Path) -> None:
    from opforge.backends import BackendOptions
    from opforge.backends.directory import DirectoryBackend
    from opforge.ops import table

    backend = DirectoryBackend(BackendOptions(directory))
    for kernel in backend.kernels(op.name for op in table()):
        own = [s.op for s in kernel.serves if s.required]
        more = [s.op for s in kernel.serves if not s.required]
        parts = [", ".join(own), f"may also implement {', '.join(more)}" if more else "", _proven(kernel)]
        _line(f"{kernel.name:40} {'; '.join(filter(None, parts))}")
    for reason in backend.skipped:
        _line(f"ignored: {reason}")


def _proven(kernel: Kernel) -> str:
    """Name the dtypes a kernel's proof holds for with this torch, and the device unless it is this CPU."""
    from opforge.cache import torch_version
    from opforge.kernels.proof import read_proof
    from opforge.runtime.devices import cpu_name

    proof = read_proof(Path(kernel.file or ""), kernel.digest)
    if isinstance(proof, str) or proof.torch.split(".")[:2] != torch_version().split(".")[:2] or not proof.operators:
        return ""
    dtypes = proof.dtypes
    more = f" and {len(dtypes) - _MAX_SHOWN_DTYPES} more" if len(dtypes) > _MAX_SHOWN_DTYPES else ""
    on = "" if proof.device == cpu_name() else f" on {proof.device}"
    return f"proven for {', '.join(dtypes[:_MAX_SHOWN_DTYPES])}{more}{on}"


def _suite(name: str, device: str, dtypes: tuple[str, ...], ops: str) -> None:
    from opforge.ops import table

    wanted = frozenset(op.name for op in table().select(ops.split(","))) if ops else None
    with ProgressLine() as progress:
        loaded = find_suite(name).load(SuiteOptions(device, dtypes, wanted), progress)
    for op, cases in loaded.cases.items():
        _line(f"{op:45} {len(cases):6} cases")
    _coverage(loaded, ops)


def _coverage(loaded: LoadedSuite, ops: str) -> None:
    """Say how many overloads the suite reaches, adding one source of cases after another."""
    by_phase: dict[str, set[str]] = {}
    counts: Counter[str] = Counter()
    for op, cases in loaded.cases.items():
        for case in cases:
            phase = case.source.rpartition(" ")[2]
            by_phase.setdefault(phase, set()).add(op)
            counts[phase] += 1
    words = {
        "forward": "forward, as dispatched",
        "composite": "forward, with composite operators called directly",
        "backward": "with backward",
        "variant": "with in-place and out variants",
        "error": "with wrong inputs (ATen must raise)",
        "optimizer": "with steps of optimizers",
    }
    reached: set[str] = set()
    for phase in (*words, *sorted(set(by_phase) - set(words))):
        if phase in by_phase:
            reached |= by_phase[phase]
            _line(f"{len(reached):6} overloads {words.get(phase, phase)} ({counts[phase]} cases)")
    _line(f"{loaded.case_count:6} cases in all, {len(loaded.losses)} kinds of samples lost")
    if not ops:
        for loss in loaded.losses:
            _line(f"       lost: {loss}")
