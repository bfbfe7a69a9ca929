"""The recording process: ``python -m opforge.suites.opinfo.record_cases DEVICE SLOT FOLDER FD``.

A child runs the entries and streams its cases to this process, which writes them. When a native
kernel kills the child, the current entry is reported as lost, and a new child continues with the
next entry. Progress goes to the descriptor FD.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from opforge.cases import Case, Expect
from opforge.cases.case_files import BLOB_FILE, TABLE_FILE, BlobWriter, write_table
from opforge.procs import linux
from opforge.procs.child import Child, open_messages, send
from opforge.suites.opinfo.stream import RecordedCase
from opforge.traces.stream import OFFSET_PLACEHOLDER

LOSSES = "losses.json"
UNKNOWN_ENTRY_EXIT_CODE = 2
"""Exit code for a selection that names an unknown OpInfo entry."""
_ENTRY_LIMIT_S = 300.0
CHILD = (sys.executable, "-P", "-m", "opforge.suites.opinfo.child")


class UnknownEntryError(Exception):
    """Names of entries that OpInfo does not have."""


class _CaseWriter:
    """Writes the child's messages into a table and a blob."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._blob = BlobWriter(folder / BLOB_FILE)
        self._cases: list[Case] = []
        self._known: dict[str, int] = {}
        """Index into ``_cases``, by signature."""

    def add(self, entry: str, call: RecordedCase) -> None:
        """Add a call; if its signature is known, only take over a better source."""
        source = f"{entry} {call.phase}"
        if (case_index := self._known.get(call.signature)) is not None:
            if not call.text:
                self._cases[case_index] = replace(self._cases[case_index], source=source)
            return
        self._known[call.signature] = len(self._cases)
        text, tree = store_tensors(self._blob, call.text, call.tree, call.storages)
        contents_digest = hashlib.blake2b(b"".join(call.storages), digest_size=16).hexdigest()
        expect = Expect.RAISES if call.raises else Expect.RETURNS
        case = Case.make(call.op, call.signature, contents=contents_digest, expect=expect)
        self._cases.append(replace(case, args=text, tree=tree, source=source))

    def finish(self, losses: Counter[str]) -> None:
        self._blob.close()
        write_table(self._folder / TABLE_FILE, self._cases)
        (self._folder / LOSSES).write_text(
            json.dumps([[message, count] for message, count in losses.most_common()], indent=0)
        )


def store_tensors(blob: BlobWriter, text: str, tree: str, storages: Iterable[bytes]) -> tuple[str, str]:
    """Store the bytes of a call's tensors; return its text and its tree with their offsets."""
    for index, storage in enumerate(storages):
        offset = blob.add(storage, hashlib.blake2b(storage, digest_size=16).digest())
        text = text.replace(f"at={OFFSET_PLACEHOLDER + index}", f"at={offset}")
        tree = tree.replace(f"[{OFFSET_PLACEHOLDER + index},", f"[{offset},")
    return text, tree


def record(
    device: str,
    slot: str,
    folder: Path,
    report: Callable[[int, int, str], None],
    command: tuple[str, ...] = CHILD,
) -> None:
    """Record one slot (a dtype, or the invalid inputs) into a folder."""
    writer, losses = _CaseWriter(folder), Counter[str]()
    # the hash seed is fixed because some OpInfo samples depend on the order of a set
    environment = {**linux.environment_without_kernels(), "PYTHONHASHSEED": "0"}
    index, total, name = 0, 1, ""
    while index < total:
        entry_started = False
        words = [*command, device, slot, str(index)]
        with Child(words, environment, limit_s=_ENTRY_LIMIT_S, stdout=subprocess.DEVNULL) as child:
            for row, contents in child.messages():
                if "unknown" in row:
                    raise UnknownEntryError(row["unknown"])
                if "entry" in row:
                    entry_started = True
                    index, total, name = row["entry"], row["total"], row["name"]
                    report(index, total, name)
                elif "losses" in row:
                    losses.update(row["losses"])
                    index += 1
                else:
                    writer.add(name, RecordedCase.from_wire(row, contents))
            ending = child.ending
        if not entry_started:
            raise RuntimeError(f"the process that runs OpInfo's entries {ending} before its first entry")
        if index < total:
            losses[f"{name}: recording {ending}; cases of this entry are lost"] += 1
            index += 1
    writer.finish(losses)
    report(total, total, "")


def main() -> None:
    pipe = open_messages()
    device, slot, folder = sys.argv[1:]

    def report(done: int, total: int, name: str) -> None:
        send(pipe, [done, total, name])
        pipe.flush()

    try:
        record(device, slot, Path(folder), report)
    except UnknownEntryError as error:
        names = ", ".join(error.args[0])
        sys.stderr.write(
            f"OPFORGE_OPINFO_ENTRIES names unknown entries of OpInfo: {names}; "
            "allowed are names such as add, nn_functional_relu, linalg_qr, separated by commas\n"
        )
        sys.exit(UNKNOWN_ENTRY_EXIT_CODE)


if __name__ == "__main__":
    main()
