"""Run users' input generators in the sandbox, from a process that does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opforge.cases import Case, Phase
from opforge.errors import InternalError
from opforge.procs.channel import Channel, ChannelClosedError
from opforge.runs.config import RunConfig
from opforge.sandbox.host.client import ForkServerHandle
from opforge.suites.base import MakeCases, Progress


def case_maker(config: RunConfig, server: ForkServerHandle, confine: Mapping[str, Any] | None) -> MakeCases:
    """Return a function that makes cases from files such as ``gen_input.py``.

    It applies the limits of the run's kernels.
    """

    def make(files: Mapping[str, Path], blob: Path, name: str, progress: Progress) -> dict[str, list[Case]]:
        ours, theirs = Channel.pair()
        line = server.spawner.connect()
        settings = {
            "device": config.device,
            "timeout_s": config.timeout_s,
            "memory_bytes": config.memory_bytes,
            "confine": confine,
            "blob": str(blob),
            "blob_name": name,
        }
        pid = server.spawner.spawn("inputs", settings, [theirs.fileno(), line.fileno()], limits={}, output=False)
        theirs.close()
        line.close()
        cases = {}
        try:
            for number, (op, file) in enumerate(files.items()):
                progress(f"inputs of {op}", number, len(files))
                ours.send({"op": op, "file": str(file.resolve())})
                cases[op] = [_case(*row) for row in ours.receive()]
            ours.send({"done": True})
            ours.receive()
        except ChannelClosedError:
            raise InternalError("the process that makes inputs died; see its errors above") from None
        finally:
            ours.close()
            server.spawner.stop(pid)
        return cases

    return make


def _case(op: str, args: str, phase: str, source: str, id_: str, tree: str, blob: str, lost: str) -> Case:
    return Case(op, args, phase=Phase(phase), source=source, id=id_, tree=tree, blob=blob, lost=lost)
