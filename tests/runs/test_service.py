"""Judging as a service: several threads hand in kernels while others are being judged."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from opforge.backends.directory import kernel_from_file
from opforge.cases import Case, Phase
from opforge.errors import InternalError
from opforge.runs import RunConfig
from opforge.runs.execute.service import JudgingService, is_correct
from opforge.runs.plan import Job, OperatorCases
from opforge.suites import LoadedSuite
from tests.runs.test_execute import BODIES, OPS, SOURCE, TO_CHECK, TO_TIME, cases, timed_alone


def job(root: Path, op: str) -> Job:
    name = f"{op}.default"
    own = [
        c for phase, shape in ((Phase.CORRECTNESS, TO_CHECK), (Phase.PERFORMANCE, TO_TIME)) for c in cases(phase, shape)
    ]
    kernel = kernel_from_file(root / op / f"{op}_implementation_1.py", op)
    return Job(kernel, (OperatorCases(name, True, [case for case in own if case.op == name]),))


@pytest.fixture
def service(shared_server):
    config = RunConfig("given", "directory", workers=2, timeout_s=30.0)
    with JudgingService(config, shared_server, LoadedSuite("given", {})) as running:
        yield running


@pytest.mark.slow
def test_each_thread_gets_its_own_verdicts_and_what_is_timed_runs_alone(kernel_directory, tmp_path, service):
    diary = tmp_path / "diary"
    words = {"diary": str(diary), "to_check": TO_CHECK, "to_time": TO_TIME}
    sources = {op: SOURCE.format(op=op, body=BODIES[op], **words) for op in OPS}
    sources["neg"] = sources["neg"].replace("-1 * self", "1 - self")
    root = kernel_directory(sources)
    with ThreadPoolExecutor(len(OPS)) as threads:
        found = dict(zip(OPS, threads.map(lambda op: service.judge(job(root, op)), OPS), strict=True))
    for op, rows in found.items():
        assert {row.op for row in rows} == {f"{op}.default"}
        wanted = [("correctness", "wrong")] if op == "neg" else [("correctness", "passed"), ("performance", "passed")]
        assert [(row.phase, row.verdict) for row in rows] == wanted
        assert all("speedup" in row.figures for row in rows if row.phase == "performance")

    calls = sorted(tuple(map(int, line.split())) for line in diary.read_text().splitlines())
    assert timed_alone(calls) == len(OPS) - 1
    assert service.busy_s > 0


def test_a_wrong_kernel_is_not_judged_on_all_of_many_cases_and_a_right_one_is(kernel_directory, service):
    root = kernel_directory({
        "relu": "def relu_kernel_impl(self):\n    return self * 0",
        "square": "def square_kernel_impl(self):\n    return self * self",
    })  # fmt: skip
    counts = {}
    for op in ("relu", "square"):
        many = [Case.make(f"{op}.default", f"((T([{size}], f32),), {{}})") for size in range(1, 101)]
        kernel = kernel_from_file(root / op / f"{op}_implementation_1.py", op)
        rows = service.judge(Job(kernel, (OperatorCases(f"{op}.default", True, many),)))
        assert len({row.id for row in rows}) == len(rows)
        counts[op] = len(rows)
    assert counts == {"relu": 25, "square": 100}


def test_a_kernel_that_declines_all_that_there_is_is_not_right(kernel_directory, service):
    root = kernel_directory({"add": "def add_kernel_impl(self, other, alpha=1):\n    raise NotImplementedError"})
    case = Case.make("add.Scalar", "((T([3], f32), 2), {})")
    asked = Job(
        kernel_from_file(root / "add" / "add_implementation_1.py", "add"), (OperatorCases("add.Scalar", False, [case]),)
    )
    rows = service.judge(asked)
    assert [row.verdict for row in rows] == ["unsupported"]
    assert not is_correct(asked, rows)


def test_who_waits_when_judging_ends_is_told(kernel_directory, shared_server):
    root = kernel_directory({"relu": "import time\ndef relu_kernel_impl(self):\n    time.sleep(1000)"})
    config = RunConfig("given", "directory", workers=1, timeout_s=600.0)
    service = JudgingService(config, shared_server, LoadedSuite("given", {}))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(service.judge, job(root, "relu"))
        while not service.busy_s:  # until it is at work
            assert not waiting.done()
            time.sleep(0.05)
        service.close()
        with pytest.raises(InternalError, match="before the kernel had its verdicts"):
            waiting.result()
    with pytest.raises(InternalError, match="judging has ended"):
        service.judge(job(root, "relu"))
