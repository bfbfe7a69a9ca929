"""The OpInfo suite: recorded in processes once per torch version, device and dtype, then cached."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock, Timeout

from opforge import cache
from opforge.cases import Case
from opforge.cases.case_files import BLOB_FILE, TABLE_FILE, read_table
from opforge.errors import InternalError, OpforgeError
from opforge.procs import linux
from opforge.procs.child import Child, child_environment
from opforge.suites.base import LoadedSuite, Progress, SuiteOptions, no_progress
from opforge.suites.opinfo.child import ERRORS, wanted_entries
from opforge.suites.opinfo.record_cases import LOSSES, UNKNOWN_ENTRY_EXIT_CODE

_FORMAT = 2


class OpInfoSuite:
    """PyTorch's own samples, forward and backward, with in-place and out variants and invalid inputs."""

    name = "opinfo"

    def load(self, options: SuiteOptions, progress: Progress = no_progress) -> LoadedSuite:
        folders = {slot: slot_folder(options.device, slot) for slot in (*options.dtypes, ERRORS)}
        _record_missing(options.device, folders, progress)
        cases: dict[str, dict[str, Case]] = defaultdict(dict)
        losses: list[str] = []
        for slot, folder in folders.items():
            for case in read_table(folder / TABLE_FILE, options.ops, blob=slot):
                cases[case.op].setdefault(case.id, case)  # without tensors: same in every dtype
            losses += [f"{slot}: {message} ({count}×)" for message, count in json.loads((folder / LOSSES).read_text())]
        ordered = {op: list(op_cases.values()) for op, op_cases in sorted(cases.items())}
        return LoadedSuite(
            self.name, ordered, {slot: folder / BLOB_FILE for slot, folder in folders.items()}, tuple(losses)
        )


def slot_folder(device: str, slot: str) -> Path:
    """Return the cache folder for a device and slot; each selection of entries has its own."""
    selection = wanted_entries()
    digest = f"-{hashlib.sha256(json.dumps(selection).encode()).hexdigest()[:12]}" if selection else ""
    return cache.root() / "opinfo" / f"{cache.torch_version()}-{_FORMAT}{digest}" / device.replace(":", "-") / slot


def _record_missing(device: str, folders: dict[str, Path], progress: Progress) -> None:
    missing = {slot: folder for slot, folder in folders.items() if not (folder / LOSSES).exists()}
    if not missing:
        return
    if find_spec("expecttest") is None:
        raise OpforgeError("the opinfo suite needs the package expecttest; install it with `pip install expecttest`")
    done = dict.fromkeys(missing, 0)
    total = dict.fromkeys(missing, 1)

    def record(slot: str) -> None:
        for entries_done, entries_total, name in _record_once(device, slot, missing[slot]):
            done[slot], total[slot] = entries_done, entries_total
            label = f"recording OpInfo, once per torch version ({device}, {slot}: {name})"
            progress(label, sum(done.values()), sum(max(t, *total.values()) for t in total.values()))

    with ThreadPoolExecutor(max(1, min(len(missing), os.cpu_count() or 1))) as pool:
        for future in [pool.submit(record, slot) for slot in missing]:
            future.result()


def _record_once(device: str, slot: str, folder: Path) -> Iterator[tuple[int, int, str]]:
    """Record a slot under a lock: of two concurrent runs, one records and the other waits."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.parent / f".{slot}.lock")
    while True:
        try:
            lock.acquire(timeout=5)
            break
        except Timeout:
            yield 0, 1, "waiting for another process that records it"
    try:
        if (folder / LOSSES).exists():
            return
        draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{slot}-"))
        try:
            yield from _record_in_process(device, slot, draft)
            shutil.rmtree(folder, ignore_errors=True)
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    finally:
        lock.release()


def _record_in_process(device: str, slot: str, draft: Path) -> Iterator[tuple[int, int, str]]:
    environment = child_environment(linux.environment_without_kernels())
    command = [sys.executable, "-P", "-m", "opforge.suites.opinfo.record_cases", device, slot, str(draft)]
    with Child(command, environment) as child:
        for (done, total, name), _ in child.messages():
            yield done, total, name
        code, output = child.wait(), child.output()
    if code == UNKNOWN_ENTRY_EXIT_CODE:
        raise OpforgeError(output.strip())
    if code != 0:
        tail = "\n".join(output.splitlines()[-15:])
        raise InternalError(f"recording OpInfo for {device} {slot} failed with status {code}:\n{tail}")
