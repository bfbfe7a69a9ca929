"""Run OpInfo's entries: ``python -m opforge.suites.opinfo.child DEVICE SLOT FIRST FD``.

A native kernel may kill this process. It streams its recordings to the descriptor FD, so a crash
loses only the current entry.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import BinaryIO

from opforge.procs.child import open_messages, send

ERRORS = "errors"
"""Slot for invalid inputs, which belong to no dtype."""


def wanted_entries() -> tuple[str, ...]:
    """Return the entry names in OPFORGE_OPINFO_ENTRIES, as in PyTorch's tests; empty means all."""
    names = (name.strip() for name in os.environ.get("OPFORGE_OPINFO_ENTRIES", "").split(","))
    return tuple(sorted({name for name in names if name}))


def run(device: str, slot: str, first: int, pipe: BinaryIO) -> None:
    """Record the entries from ``first`` on."""
    import torch

    from opforge.cases.wire import TORCH_DTYPES
    from opforge.suites.opinfo import entries
    from opforge.suites.opinfo.case_recorder import CaseRecorder

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if torch.device(device).type == "cpu":
        _seed_cpu_only()
    with pipe:
        recorder = CaseRecorder(lambda recorded: recorded.send(pipe), device)
        selected, unknown = entries.selected_entries(wanted_entries())
        if unknown:
            send(pipe, {"unknown": unknown})
        for index, entry in enumerate(selected[first:], first):
            send(pipe, {"entry": index, "total": len(selected), "name": entries.name_of(entry)})
            pipe.flush()
            if slot == ERRORS:
                entries.record_errors(entry, device, recorder)
            else:
                entries.record_samples(entry, device, TORCH_DTYPES[slot], recorder)
            send(pipe, {"losses": recorder.losses})
            recorder.losses.clear()
            pipe.flush()


def _seed_cpu_only() -> None:
    """Make ``torch.manual_seed`` seed only the CPU.

    OpInfo seeds before every sample, and torch would format a stack trace for each absent GPU.
    """
    import torch

    def manual_seed(seed: int) -> torch.Generator:
        return torch.default_generator.manual_seed(int(seed))

    torch.manual_seed = manual_seed


if __name__ == "__main__":
    messages = open_messages()
    run(sys.argv[1], sys.argv[2], int(sys.argv[3]), messages)
