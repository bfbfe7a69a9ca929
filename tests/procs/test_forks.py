"""Functions in forks: what they send and return, and how they end."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

import pytest

from opforge.procs.forks import ForkResult

# Forks are made by a process without threads, which this one may not be.
RUN = """
import json, os, select, signal, subprocess, sys, time
from dataclasses import asdict
from opforge.procs.forks import ForkJob, run_fork, run_forks

def answers(send):
    send("first")
    send(["second", 2])
    return {"session": os.getsid(0) == os.getpid(), "input": os.read(0, 1).decode()}

def dies(send):
    send("before")
    os.write(1, b"to stdout, ")
    os.write(2, b"to stderr")
    os.kill(os.getpid(), signal.SIGSEGV)

def raises(send):
    raise ValueError("no")

class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError

def raises_without_text(send):
    raise Unspeakable

def leaves(send):
    os._exit(0)

def hangs(send):
    send("begun")
    time.sleep(300)

def hangs_without_pipe(send):
    os.closerange(3, 64)
    time.sleep(300)

def leaves_a_child(send):
    return subprocess.Popen(["sleep", "300"], close_fds=False).pid

def dies_beside_a_fork(send):
    if os.fork() == 0:
        time.sleep(300)  # holds the pipe
    os._exit(3)

def sends_much(send):
    for _ in range(20):
        send("x" * 100_000)
    print("y" * 100_000, flush=True)
    return "z" * 1_000_000

def ends(pid):
    try:
        return bool(select.select([os.pidfd_open(pid)], [], [], 30)[0])
    except ProcessLookupError:
        return True

before = sorted(os.listdir("/proc/self/fd"))
actions = (
    answers, dies, raises, raises_without_text, leaves, hangs, hangs_without_pipe, leaves_a_child, dies_beside_a_fork,
    sends_much,
)
limits = {"hangs": 5.0, "hangs_without_pipe": 5.0}  # a busy machine needs a while to begin
jobs = [ForkJob(action, limits.get(action.__name__, 60.0), action.__name__) for action in actions]
results = {result.key: asdict(result) for result in run_forks(jobs, 3)}
unfinished = run_forks([ForkJob(hangs, 60.0), ForkJob(answers, 60.0)], 2)
next(unfinished)
unfinished.close()
try:
    os.waitpid(-1, os.WNOHANG)
    children = True
except ChildProcessError:
    children = False
print(json.dumps({
    "results": results,
    "alone": asdict(run_fork(answers, 60.0)),
    "children": children,
    "descriptors kept": sorted(os.listdir("/proc/self/fd")) == before,
    "orphan gone": ends(results["leaves_a_child"]["answer"]),
}))
"""


@pytest.fixture(scope="module")
def ran() -> dict:
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def result(ran: dict, name: str) -> ForkResult:
    return ForkResult(**ran["results"][name])


def test_what_a_function_sends_and_returns(ran):
    answer = {"session": True, "input": ""}
    expected = ForkResult("answers", 0, ["first", ["second", 2]], answer, None, "", False, "")
    assert result(ran, "answers") == expected
    assert ran["alone"] == {**asdict(expected), "key": None}
    much = result(ran, "sends_much")
    assert (len(much.sent), len(much.answer), len(much.output)) == (20, 1_000_000, 100_001)


@pytest.mark.parametrize(
    ("name", "code", "sent", "death"),
    [
        ("dies", -11, ["before"], "died of SIGSEGV (signal 11)"),
        ("leaves", 0, [], "exited with status 0"),
        ("dies_beside_a_fork", 3, [], "exited with status 3"),
        ("raises_without_text", 1, [], "exited with status 1"),
    ],
)
def test_a_death_is_described(ran, name, code, sent, death):
    ended = result(ran, name)
    assert (ended.code, ended.sent, ended.death, ended.timed_out, ended.answer) == (code, sent, death, False, None)
    if name == "dies":
        assert ended.output == "to stdout, to stderr"


def test_an_error_is_told(ran):
    ended = result(ran, "raises")
    assert (ended.code, ended.error, ended.death) == (1, "ValueError: no", "")
    assert ended.output.endswith("ValueError: no\n")


@pytest.mark.parametrize(("name", "sent"), [("hangs", ["begun"]), ("hangs_without_pipe", [])])
def test_a_time_limit_ends_a_fork(ran, name, sent):
    ended = result(ran, name)
    assert (ended.timed_out, ended.sent, ended.death, ended.code) == (True, sent, "", -9)


def test_no_process_and_no_descriptor_is_left(ran):
    assert ran["orphan gone"]
    assert not ran["children"]
    assert ran["descriptors kept"]
