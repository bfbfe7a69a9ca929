"""Processes that send messages: the messages, the limits, the output, and how they end."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from opforge.procs.child import Child, child_environment

BEGIN = "import os, signal, subprocess, sys, time\nfrom opforge.procs.child import open_messages, send\npipe = open_messages()\n"


def child(code: str, **options) -> Child:
    return Child([sys.executable, "-c", f"{BEGIN}{code}", "given"], child_environment(), **options)


def ends(pid: int, limit_s: float = 30.0) -> bool:
    """Whether a process, perhaps killed just now, ends within a limit."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ready, _, _ = select.select([pidfd], [], [], limit_s)
    os.close(pidfd)
    return bool(ready)


def pids_of_children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_messages_come_with_contents_and_the_question_is_on_stdin():
    code = "send(pipe, [sys.argv[1:], sys.stdin.read()], b'x' * 3_000_000); print('printed'); sys.exit(4)"
    with child(code, question="q" * 100_000) as process:
        assert list(process.messages()) == [([["given"], "q" * 100_000], b"x" * 3_000_000)]
        assert process.wait() == 4
        assert (process.ending, process.output(), process.timed_out) == ("exited with status 4", "printed\n", False)


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "died of SIGSEGV (signal 11)"),
        ("pipe.close(); os._exit(3)", "exited with status 3"),
        ("subprocess.Popen(['sleep', '20'], pass_fds=[pipe.fileno()]); os._exit(3)", "exited with status 3"),
        ("os.write(pipe.fileno(), b'\\xff\\xff'); os._exit(3)", "exited with status 3"),  # a part of a header
        ("os.write(pipe.fileno(), b'\\xff' * 8 + b'{'); os._exit(3)", "exited with status 3"),  # a part of a message
    ],
)
def test_an_end_is_described_after_whole_messages(code, ending):
    with child(f"send(pipe, 1); pipe.flush()\n{code}", limit_s=60.0) as process:
        assert list(process.messages()) == [(1, b"")]
        assert (process.ending, process.timed_out) == (ending, False)


def test_a_fork_sends_nothing():
    code = "send(pipe, 1)\nfork = os.fork()\nsend(pipe, 2); pipe.flush()\nif fork: os.waitpid(fork, 0)"
    with child(code, limit_s=60.0) as process:
        assert list(process.messages()) == [(1, b""), (2, b"")]
        assert (process.wait(), process.output()) == (0, "")


@pytest.mark.parametrize("code", ["", "os.write(pipe.fileno(), b'\\xff' * 8 + b'{')", "pipe.close()"])
def test_silence_is_limited(code):
    with child(f"send(pipe, 1); pipe.flush()\n{code}\ntime.sleep(300)", limit_s=60.0) as process:
        messages = process.messages()
        assert next(messages) == (1, b"")
        process._limit_s = 0.5  # starting takes longer on a busy machine
        assert list(messages) == []
        assert (process.wait(), process.timed_out, process.ending) == (-9, True, "took more than 0.5 s")


@pytest.mark.parametrize("own_session", [False, True])
def test_the_end_of_the_block_ends_the_process(own_session):
    before = pids_of_children()
    code = "send(pipe, [os.getpid(), subprocess.Popen(['sleep', '30']).pid]); pipe.flush(); time.sleep(300)"
    with pytest.raises(KeyboardInterrupt), child(code, own_session=own_session) as process:
        (pid, grandchild), _ = next(process.messages())
        raise KeyboardInterrupt
    assert pids_of_children() == before
    assert ends(pid)
    assert ends(grandchild, 30.0 if own_session else 0.0) == own_session


def test_a_child_dies_with_its_parent():
    parent = f"""
import os, sys
from opforge.procs.child import Child
with Child([sys.executable, "-c", {BEGIN + "send(pipe, os.getpid()); pipe.flush(); time.sleep(300)"!r}], os.environ) as child:
    print(next(child.messages())[0], flush=True)
    os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", parent], stdout=-1, text=True, env=child_environment(), check=True)
    assert ends(int(done.stdout))


def test_output_may_go_elsewhere(tmp_path):
    with (tmp_path / "out").open("wb") as out, child("print('printed')", stdout=out.fileno()) as process:
        assert list(process.messages()) == []
        assert (process.wait(), process.output()) == (0, "")
    assert (tmp_path / "out").read_text() == "printed\n"
