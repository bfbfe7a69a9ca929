"""What is known of processes from outside: whether one had to wait for others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from opforge.procs.linux import run_queue_wait_ns

SPIN = """
import hashlib, os, sys, threading
os.sched_setaffinity(0, {int(sys.argv[1])})
def spin():
    hashlib.pbkdf2_hmac("sha256", b"", b"", 400_000)  # some time, without holding the interpreter
others = [threading.Thread(target=spin) for _ in range(int(sys.argv[2]))]
for other in others:
    other.start()
spin()
for other in others:
    other.join()
print("done", flush=True)
input()
"""


@pytest.mark.parametrize("threads", [0, 2])
def test_a_process_waits_for_others_on_its_core_and_not_for_its_own_threads(threads):
    core = min(os.sched_getaffinity(0))
    command = [sys.executable, "-c", SPIN, str(core)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        subprocess.Popen([*command, "0"], **pipes) as neighbour,
        subprocess.Popen([*command, str(threads)], **pipes) as process,
    ):
        assert process.stdout.readline() == "done\n"
        ran, waited, *_ = map(int, Path(f"/proc/{process.pid}/schedstat").read_text().split())
        for_others = run_queue_wait_ns(process.pid)
        for one in (neighbour, process):
            one.communicate("\n")
    assert waited > 0.05 * ran
    if threads:
        assert for_others < waited - 0.5 * ran
    else:
        assert abs(for_others - waited) < 0.05 * ran


def test_of_a_process_that_is_gone_nothing_is_said():
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert run_queue_wait_ns(gone.pid) == 0
