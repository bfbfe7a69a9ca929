"""The process that runs OpInfo's entries: ``python -m opforge.suites.opinfo.child DEVICE SLOT FIRST FD``.

Native kernels may kill it. It streams what it records to the descriptor FD, so that nothing before the crash is lost.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import warnings
from dataclasses import asdict, replace
from typing import Any

from opforge.processes import die_with_parent

LENGTHS = struct.Struct("<II")
"""Before each message: the length of its JSON and of the bytes after it."""
ERRORS = "errors"
"""The slot of wrong inputs, which belong to no dtype."""


def run(device: str, slot: str, first: int, fd: int) -> None:
    """Record the entries from ``first`` on."""
    import torch  # noqa: PLC0415

    from opforge.cases.encoding import TORCH_DTYPES  # noqa: PLC0415
    from opforge.suites.opinfo import entries  # noqa: PLC0415
    from opforge.suites.opinfo.recorder import Recorded, Recorder  # noqa: PLC0415

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with os.fdopen(fd, "wb") as pipe:

        def send(message: dict[str, Any], contents: bytes = b"") -> None:
            body = json.dumps(message).encode()
            pipe.write(LENGTHS.pack(len(body), len(contents)) + body + contents)

        def emit(recorded: Recorded) -> None:
            row = {**asdict(replace(recorded, storages=[])), "sizes": [len(s) for s in recorded.storages]}
            send(row, b"".join(recorded.storages))

        recorder = Recorder(emit, device)
        every = entries.all_entries()
        for index, entry in enumerate(every[first:], first):
            send({"entry": index, "total": len(every), "name": entries.name_of(entry)})
            pipe.flush()
            if slot == ERRORS:
                entries.record_errors(entry, device, recorder)
            else:
                entries.record_samples(entry, device, TORCH_DTYPES[slot], recorder)
            send({"losses": recorder.losses})
            recorder.losses.clear()
            pipe.flush()


if __name__ == "__main__":
    die_with_parent()
    run(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
