"""What is timed runs last, and by itself: seen by kernels that write down when they are called."""

from __future__ import annotations

from itertools import groupby

import pytest

from opforge.backends.directory import DirectoryBackend
from opforge.cases import Case, Phase
from opforge.runs import RunConfig, run
from opforge.runs.execute.local import ThisMachine, same_kind_gpus
from opforge.suites.given import GivenSuite
from tests.conftest import verdicts

OPS = ("abs", "neg", "relu", "square")
TO_CHECK, TO_TIME = (5, 7), (32, 33)
SOURCE = """
    import os, time, torch
    said = os.open({diary!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    def {op}_kernel_impl(self):
        if tuple(self.shape) in ({to_check}, {to_time}):
            cores = len(os.sched_getaffinity(0))
            os.write(said, f"{{time.monotonic_ns()}} {{os.getpid()}} {{self.shape[0]}} {{cores}}\\n".encode())
        return {body}
"""
BODIES = {
    "abs": "torch.where(self < 0, -self, self + 0)",
    "neg": "-1 * self",
    "relu": "torch.where(self <= 0, 0, self)",
    "square": "self * self",
}


def cases(phase: Phase, shape: tuple[int, ...]) -> list[Case]:
    return [Case.make(f"{op}.default", f"((T({list(shape)}, f32),), {{}})", phase=phase) for op in OPS]


def timed_alone(calls: list[tuple[int, ...]]) -> int:
    """See that while a kernel is timed, and held to one core, no other is called; return how many were timed."""
    timed = [pid for _, pid, _, cores in calls if cores == 1]
    kernels = set(timed)
    for kernel in kernels:
        begin, *_, end = (at for at, pid, _, cores in calls if pid == kernel and cores == 1)
        assert {pid for at, pid, _, _ in calls if begin <= at <= end} == {kernel}
    assert len(timed) > 100 * len(kernels)
    return len(kernels)


@pytest.mark.slow
def test_what_is_timed_comes_after_all_else_one_kernel_at_a_time(kernel_directory, tmp_path):
    diary = tmp_path / "diary"
    words = {"diary": str(diary), "to_check": TO_CHECK, "to_time": TO_TIME}
    root = kernel_directory({op: SOURCE.format(op=op, body=BODIES[op], **words) for op in OPS})
    config = RunConfig("given", "directory", ops_directory=str(root), workers=2, timeout_s=30.0, confine=False)
    suite = GivenSuite([*cases(Phase.PERFORMANCE, TO_TIME), *cases(Phase.CORRECTNESS, TO_CHECK)])
    ended = run(config, tmp_path / "run", suite=suite, backend=DirectoryBackend(config.backend_options))

    assert verdicts(ended) == {f"{op}.default": {("passed", "")} for op in OPS}
    rows = list(ended.store.rows())
    assert [phase for phase, _ in groupby(row.phase for row in rows)] == ["correctness", "performance"]
    assert all("speedup" in row.figures for row in rows if row.phase == "performance")

    calls = sorted(tuple(map(int, line.split())) for line in diary.read_text().splitlines())
    shapes = [first for first, _ in groupby(first for _, _, first, _ in calls)]
    assert shapes == [TO_CHECK[0], TO_TIME[0]]
    assert timed_alone(calls) == len(OPS)
    spent = ended.manifest.activity
    assert spent.timing_s > config.race_s  # four races, one after another
    assert spent.judging_s > 0 < spent.waiting_s  # one of two judges waits for the other


ON_GPUS = """
    import os, time, torch
    said = os.open({diary!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    def {op}_kernel_impl(self):
        if tuple(self.shape) in ({to_check}, {to_time}):
            os.write(said, f"{{os.environ.get('CUDA_VISIBLE_DEVICES')}} {{os.getpid()}} {{self.shape[0]}} {op}\\n".encode())
        return {body}
"""


@pytest.mark.slow
def test_on_two_gpus_each_times_one_kernel_at_a_time(kernel_directory, tmp_path, monkeypatch):
    monkeypatch.setattr(ThisMachine, "_gpus", lambda _self: ["3", "5"])
    diary = tmp_path / "diary"
    words = {"diary": str(diary), "to_check": TO_CHECK, "to_time": TO_TIME}
    root = kernel_directory({op: ON_GPUS.format(op=op, body=BODIES[op], **words) for op in OPS})
    config = RunConfig("given", "directory", ops_directory=str(root), workers=1, timeout_s=30.0, confine=False)
    suite = GivenSuite([*cases(Phase.PERFORMANCE, TO_TIME), *cases(Phase.CORRECTNESS, TO_CHECK)])
    ended = run(config, tmp_path / "run", suite=suite, backend=DirectoryBackend(config.backend_options))
    assert verdicts(ended) == {f"{op}.default": {("passed", "")} for op in OPS}

    calls = [line.split() for line in diary.read_text().splitlines()]
    for first in (TO_CHECK[0], TO_TIME[0]):
        assert {gpu for gpu, _, shape, _ in calls if int(shape) == first} == {"3", "5"}
    for gpu in ("3", "5"):
        turns = [
            pid for pid, _ in groupby(pid for at, pid, shape, _ in calls if at == gpu and int(shape) == TO_TIME[0])
        ]
        assert len(turns) == len(set(turns))  # no other kernel on this GPU between two calls of one
    assert {op for *_, op in calls} == set(OPS)


def test_gpus_of_one_kind_are_shared_out():
    assert same_kind_gpus(["H200"], None) == []
    assert same_kind_gpus(["H200", "H200", "T4", "H200"], None) == ["0", "1", "3"]
    assert same_kind_gpus(["H200", "H200"], "4, 7") == ["4", "7"]
    assert same_kind_gpus(["H200", "T4"], None) == []
