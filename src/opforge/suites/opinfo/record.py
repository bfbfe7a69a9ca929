"""The recording process: ``python -m opforge.suites.opinfo.record DEVICE SLOT FOLDER``.

A forked child runs the entries and streams its cases to this process, which writes them. When a native kernel kills the
child, the entry it was at is lost, said to be, and another child goes on with the next.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import select
import signal
import struct
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from opforge.cases import Case, Expect
from opforge.cases.store import BLOB, TABLE, BlobWriter, write_table
from opforge.processes import describe_status, die_with_parent

ERRORS = "errors"
"""The slot of wrong inputs, which belong to no dtype."""
LOSSES = "losses.json"
_ENTRY_LIMIT_S = 180.0
_LENGTHS = struct.Struct("<II")


class _Child:
    """A forked process that works through the entries from a given one on."""

    def __init__(self, entries: list[Any], first: int, work: Callable[[Any, Any], None], known: set[str]) -> None:
        read, write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(read)
            die_with_parent()
            _run_child(os.fdopen(write, "wb"), entries, first, work, known)
        os.close(write)
        self._pipe = cast("io.BufferedReader", os.fdopen(read, "rb", buffering=1 << 20))

    def message(self) -> tuple[dict[str, Any], bytes] | None:
        """Return the next message, or None when the child has ended or takes too long."""
        if not self._pipe.peek(1) and not select.select([self._pipe], [], [], _ENTRY_LIMIT_S)[0]:
            return None
        head = self._pipe.read(_LENGTHS.size)
        if len(head) < _LENGTHS.size:
            return None
        size, extra = _LENGTHS.unpack(head)
        body = self._pipe.read(size)
        contents = self._pipe.read(extra)
        return (json.loads(body), contents) if len(contents) == extra and len(body) == size else None

    def end(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        self._pipe.close()
        return os.waitpid(self._pid, 0)[1]

    def wait(self) -> int:
        """Wait for a child whose pipe has ended."""
        self._pipe.close()
        return os.waitpid(self._pid, 0)[1]


def _run_child(
    pipe: BinaryIO, entries: list[Any], first: int, work: Callable[[Any, Any], None], known: set[str]
) -> None:
    """In the child: never returns."""
    from opforge.suites.opinfo.recorder import Recorder  # noqa: PLC0415

    def send(message: dict[str, Any], contents: bytes = b"") -> None:
        body = json.dumps(message).encode()
        pipe.write(_LENGTHS.pack(len(body), len(contents)) + body + contents)

    recorder = Recorder(
        lambda r: send({**asdict(replace(r, storages=[])), "sizes": [len(s) for s in r.storages]}, b"".join(r.storages))
    )
    recorder.seen.update(known)
    warnings.simplefilter("ignore")
    try:
        for index in range(first, len(entries)):
            send({"entry": index})
            pipe.flush()
            work(entries[index], recorder)
            send({"losses": recorder.losses})
            recorder.losses.clear()
            pipe.flush()
    finally:
        os._exit(0 if sys.exc_info()[0] is None else 1)


class _Writer:
    """Turns what the child sends into a table and a blob."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._blob = BlobWriter(folder / BLOB)
        self.cases: list[Case] = []
        self.known: set[str] = set()

    def add(self, entry: str, row: dict[str, Any], contents: bytes) -> None:
        from opforge.suites.opinfo.recorder import PLACE  # noqa: PLC0415

        if row["signature"] in self.known:
            return
        self.known.add(row["signature"])
        text, tree, at = row["text"], row["tree"], 0
        whole = hashlib.blake2b(contents, digest_size=16).hexdigest()
        for index, size in enumerate(row["sizes"]):
            part = contents[at : at + size]
            at += size
            place = self._blob.add(part, hashlib.blake2b(part, digest_size=16).digest())
            text = text.replace(f"at={PLACE + index}", f"at={place}")
            tree = tree.replace(f"[{PLACE + index},", f"[{place},")
        expect = Expect.RAISES if row["raises"] else Expect.RETURNS
        made = Case.make(row["op"], row["signature"], contents=whole, expect=expect)
        source = f"{entry} {row['phase']}"
        self.cases.append(replace(made, args=text, tree=tree, source=source))

    def finish(self, losses: Counter[str]) -> None:
        self._blob.close()
        write_table(self._folder / TABLE, self.cases)
        (self._folder / LOSSES).write_text(
            json.dumps([[what, count] for what, count in losses.most_common()], indent=0)
        )


def record(device: str, slot: str, folder: Path, report: Callable[[int, int, str], None]) -> None:
    """Record one slot (a dtype, or the wrong inputs) into a folder."""
    import torch  # noqa: PLC0415

    from opforge.cases.encoding import TORCH_DTYPES  # noqa: PLC0415
    from opforge.suites.opinfo import entries as entry_module  # noqa: PLC0415

    torch.set_num_threads(1)
    entries = entry_module.all_entries()

    def work(entry: Any, recorder: Any) -> None:
        if slot == ERRORS:
            entry_module.record_errors(entry, device, recorder)
        else:
            entry_module.record_samples(entry, device, TORCH_DTYPES[slot], recorder)

    writer, losses, index = _Writer(folder), Counter[str](), 0
    while index < len(entries):
        child = _Child(entries, index, work, writer.known)
        while (message := child.message()) is not None:
            row, contents = message
            if "entry" in row:
                index = row["entry"]
                report(index, len(entries), entry_module.name_of(entries[index]))
            elif "losses" in row:
                losses.update(row["losses"])
                index += 1
            else:
                writer.add(entry_module.name_of(entries[index]), row, contents)
        if index >= len(entries):
            child.wait()
            break
        status = child.end()
        name = entry_module.name_of(entries[index])
        losses[f"{name}: recording {describe_status(status)}; the rest of the entry is lost"] += 1
        index += 1
    writer.finish(losses)
    report(len(entries), len(entries), "")


def main() -> None:
    device, slot, folder = sys.argv[1:]

    def report(done: int, total: int, name: str) -> None:
        sys.stdout.write(json.dumps([done, total, name]) + "\n")
        sys.stdout.flush()

    record(device, slot, Path(folder), report)


if __name__ == "__main__":
    main()
