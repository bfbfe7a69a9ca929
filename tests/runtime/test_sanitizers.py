"""The native runtime under the address, undefined behaviour and thread sanitizers, with eight threads.

Only the library is instrumented; Python and torch are not. So a report names the library's code, or it is about code
that is not ours. One report is suppressed: glibc frees the local memory of a thread that has ended, after
a synchronisation that the sanitizer does not see.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from opforge.runtime.native import building
from tests.runtime import standin

ROOT = Path(__file__).parents[2]
FLAGS = {
    "address": ("-fsanitize=address,undefined", "-fno-sanitize=vptr"),  # torch hides the types that vptr compares
    "thread": ("-fsanitize=thread",),
}
REPORTS = ("ERROR: AddressSanitizer", "runtime error:", "WARNING: ThreadSanitizer")
INJECTED = {
    "address": (
        "slot.h",
        "    delete_when_unseen(old);\n",
        "    delete_when_unseen(old);\n    rules->size += old->size;\n",
    ),
    "thread": (
        "slot.h",
        "    if (!table) return false;\n",
        "    if (!table) return false;\n    ++unguarded;\n",
    ),
}
"""Bugs that each sanitizer must find: a use of freed memory, and a counter without a lock."""


def library_of(name: str) -> str:
    """Return the path of a library of the compiler's; empty if it is not there."""
    path = subprocess.run(
        [*building._compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return str(Path(path).resolve()) if Path(path).is_absolute() else ""


def build(folder: Path, sanitizer: str, *, bug: bool) -> Path:
    """Build the library with a sanitizer, and with a bug if that is wanted."""
    sources = Path(shutil.copytree(building.SOURCES, folder / "csrc"))
    if bug:
        name, text, replacement = INJECTED[sanitizer]
        source = (sources / name).read_text(encoding="utf-8")
        assert source.count(text) == 1
        source = source.replace(text, replacement).replace("class Slot {", "static int unguarded = 0;\n\nclass Slot {")
        (sources / name).write_text(source, encoding="utf-8")
    for_torch, links = building._flags_for_torch()
    library = folder / "runtime.so"
    flags = [*for_torch, *FLAGS[sanitizer], "-O1", "-g1", "-fno-omit-frame-pointer"]
    command = [*building._compiler(), *flags, str(sources / "runtime.cpp"), "-o", str(library), *links]
    subprocess.run(command, check=True)
    return library


def reports_of(library: Path, sanitizer: str, folder: Path) -> str:
    """Run the stress with a library; return what the sanitizer reports."""
    runtime = {"address": "libasan.so", "thread": "libtsan.so"}[sanitizer]
    log = folder / "report"
    options = f"log_path={log}:exitcode=0:print_stacktrace=1"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "PYTHONMALLOC": "malloc",
        "OMP_NUM_THREADS": "1",
        "LD_PRELOAD": f"{library_of(runtime)} {library_of('libstdc++.so.6')}",  # the second: exceptions need it
        "ASAN_OPTIONS": f"{options}:detect_leaks=0",  # plans and slots live as long as the process
        "UBSAN_OPTIONS": options,
        "TSAN_OPTIONS": f"{options}:die_after_fork=0:suppressions={folder / 'suppressions'}",
    }
    (folder / "suppressions").write_text("race:_dl_deallocate_tls\n", encoding="ascii")
    stand_in = standin.build(folder)
    command = [sys.executable, "-m", "tests.runtime.stress", str(library), str(stand_in)]
    done = subprocess.run(
        [*command, "fork" if sanitizer == "address" else "no fork"],
        env=environment, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    text = done.stderr + "".join(path.read_text(errors="replace") for path in folder.glob("report.*"))
    if not any(report in text for report in REPORTS):
        assert done.returncode == 0, text
        assert "calls, kernels were changed" in done.stdout
        return ""
    return text


SCHEDULES = 5
"""Runs of the stress, at most, in which a bug that is there must be seen."""


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True])
@pytest.mark.parametrize("sanitizer", FLAGS)
def test_sanitizers_report_nothing_unless_there_is_a_bug(tmp_path, sanitizer, bug):
    if not library_of({"address": "libasan.so", "thread": "libtsan.so"}[sanitizer]):
        pytest.skip(f"the compiler has no {sanitizer} sanitizer")
    library = build(tmp_path, sanitizer, bug=bug)
    reports = reports_of(library, sanitizer, tmp_path)
    for _ in range(SCHEDULES - 1):
        if not bug or reports:
            break  # a race shows only where two threads meet: on a busy machine they may take turns all the time
        reports = reports_of(library, sanitizer, tmp_path)
    assert ("csrc/slot.h" in reports) is bug, reports
    assert bool(reports) is bug, reports
