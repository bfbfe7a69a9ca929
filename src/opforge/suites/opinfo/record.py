"""The recording process: ``python -m opforge.suites.opinfo.record DEVICE SLOT FOLDER``.

A child runs the entries and streams its cases to this process, which writes them. When a native kernel kills the child,
the entry it was at is lost, said to be, and another child goes on with the next.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import select
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from opforge.cases import Case, Expect
from opforge.cases.store import BLOB, TABLE, BlobWriter, write_table
from opforge.processes import describe_returncode
from opforge.suites.opinfo.stream import LENGTHS, PLACE

LOSSES = "losses.json"
_ENTRY_LIMIT_S = 300.0
CHILD = (sys.executable, "-P", "-m", "opforge.suites.opinfo.child")


class _Child:
    """A process that works through the entries from a given one on."""

    def __init__(self, command: tuple[str, ...], device: str, slot: str, first: int) -> None:
        read, write = os.pipe()
        words = [*command, device, slot, str(first), str(write)]
        self._process = subprocess.Popen(words, pass_fds=[write], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        os.close(write)
        self._pipe = cast("io.BufferedReader", os.fdopen(read, "rb", buffering=1 << 20))
        self.hung = False

    def message(self) -> tuple[dict[str, Any], bytes] | None:
        """Return the next message, or None when the child has ended or takes too long."""
        head = self._read(LENGTHS.size)
        if len(head) < LENGTHS.size:
            return None
        size, extra = LENGTHS.unpack(head)
        body, contents = self._read(size), self._read(extra)
        return (json.loads(body), contents) if (len(body), len(contents)) == (size, extra) else None

    def _read(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            if not select.select([self._pipe], [], [], _ENTRY_LIMIT_S)[0]:
                self.hung = True
                break
            part = self._pipe.raw.read(size)
            if not part:
                break
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def end(self) -> str:
        """Wait for the process, ending it if it hangs, and say how it ended."""
        if self.hung:
            self._process.kill()
        self._pipe.close()
        code = self._process.wait()
        return f"took more than {_ENTRY_LIMIT_S:g} s" if self.hung else describe_returncode(code)


class _Writer:
    """Turns what the child sends into a table and a blob."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._blob = BlobWriter(folder / BLOB)
        self._cases: list[Case] = []
        self._known: dict[str, int] = {}
        """Where the case of each signature stands."""

    def add(self, entry: str, row: dict[str, Any], contents: bytes) -> None:
        """Keep a call, unless one with its signature is kept; then a better source may be noted."""
        source = f"{entry} {row['phase']}"
        if (known := self._known.get(row["signature"])) is not None:
            if not row["text"]:
                self._cases[known] = replace(self._cases[known], source=source)
            return
        self._known[row["signature"]] = len(self._cases)
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
        self._cases.append(replace(made, args=text, tree=tree, source=source))

    def finish(self, losses: Counter[str]) -> None:
        self._blob.close()
        write_table(self._folder / TABLE, self._cases)
        (self._folder / LOSSES).write_text(
            json.dumps([[what, count] for what, count in losses.most_common()], indent=0)
        )


def record(
    device: str,
    slot: str,
    folder: Path,
    report: Callable[[int, int, str], None],
    command: tuple[str, ...] = CHILD,
) -> None:
    """Record one slot (a dtype, or the wrong inputs) into a folder."""
    writer, losses = _Writer(folder), Counter[str]()
    index, total, name = 0, 1, ""
    while index < total:
        child = _Child(command, device, slot, index)
        begun = False
        while (message := child.message()) is not None:
            row, contents = message
            if "entry" in row:
                begun = True
                index, total, name = row["entry"], row["total"], row["name"]
                report(index, total, name)
            elif "losses" in row:
                losses.update(row["losses"])
                index += 1
            else:
                writer.add(name, row, contents)
        how = child.end()
        if not begun:
            raise RuntimeError(f"the process that runs OpInfo's entries {how} before its first entry")
        if index < total:
            losses[f"{name}: recording {how}; cases of this entry are lost"] += 1
            index += 1
    writer.finish(losses)
    report(total, total, "")


def main() -> None:
    device, slot, folder = sys.argv[1:]

    def report(done: int, total: int, name: str) -> None:
        sys.stdout.write(json.dumps([done, total, name]) + "\n")
        sys.stdout.flush()

    record(device, slot, Path(folder), report)


if __name__ == "__main__":
    main()
