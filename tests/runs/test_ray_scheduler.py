"""Tasks on their way through a cluster, with a stand-in for Ray that loses what it is told to lose."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from opforge.cases import Case, Phase
from opforge.errors import OpforgeError
from opforge.kernels import Kernel, ServedOperator
from opforge.runs.execute.ray.node import ForkServerLostError, NoForkServerError
from opforge.runs.execute.ray.placement import TASKS_PER_SLOT, Node, Placement
from opforge.runs.execute.ray.scheduler import MAX_FAILED_STARTS, MAX_LOSSES, MAX_TASK_CASES, Scheduler, split_job
from opforge.runs.execute.ray.shipment import Shipment
from opforge.runs.plan import Job, OperatorCases
from opforge.runs.rows import ResultRow

HOME = "a" * 56
NODES = [Node(HOME, "", 2, 0), Node("b" * 56, "", 1, 0)]


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class TaskUnschedulableError(RayError):
    pass


class StandIn:
    """Does tasks at once, message by message; ``loses`` says with what a task of a kernel ends, after how many verdicts."""

    exceptions = SimpleNamespace(
        RayError=RayError, RayTaskError=RayTaskError, TaskUnschedulableError=TaskUnschedulableError
    )

    def __init__(self, loses: Callable[[str, int], tuple[int, Exception] | None]) -> None:
        self._loses = loses
        self.tries: Counter[str] = Counter()
        self.most = 0
        self.asked: list[Any] = []

    def remote(self, _function: Any) -> StandIn:
        return self

    def options(self, **options: Any) -> Any:
        assert options["max_retries"] == 0
        self.asked.append(options.get("scheduling_strategy"))
        return SimpleNamespace(remote=self._task)

    def wait(self, flying: list[Any], num_returns: int = 1, **_options: Any) -> tuple[list[Any], list[Any]]:
        self.most = max(self.most, len(flying))
        return flying[:num_returns], flying[num_returns:]

    def get(self, message: Any) -> Any:
        if isinstance(message, Exception):
            raise message
        return message

    def _task(self, _settings: Any, shipment: Shipment, **_options: Any) -> Iterator[Any]:
        return self._messages(shipment.job)

    def _messages(self, job: Job) -> Iterator[Any]:
        name = job.kernel.name
        self.tries[name] += 1
        lost = self._loses(name, self.tries[name])
        yield {"began": 0.0, "node": HOME}
        for number, case in enumerate(c for p in job.operators for c in p.cases):
            if lost is not None and number == lost[0]:
                yield lost[1]
                return
            row = {"kernel": name, "op": case.op, "id": case.id, "phase": case.phase.value, "verdict": "passed"}
            yield {"rows": [row, row]}  # the second of which is not to count


def job(name: str, count: int, ops: tuple[str, ...] = ("relu.default",)) -> Job:
    parts = [OperatorCases(op, True, [Case.make(op, f"((T([{n}], f32),), {{}})") for n in range(count)]) for op in ops]
    return Job(Kernel(name, ops[0], tuple(map(ServedOperator, ops))), tuple(parts))


def flown(ray: StandIn, jobs: list[Job]) -> tuple[list[ResultRow], Counter[str]]:
    rows: list[ResultRow] = []
    record = io.StringIO()
    Scheduler(ray, Placement(gpu=False), 1000, rows.extend, record, 60.0, lambda: NODES).run(
        jobs, Phase.CORRECTNESS, None
    )
    return rows, Counter(json.loads(line)["end"] for line in record.getvalue().splitlines())


def test_many_kernels_a_few_at_a_time_and_every_case_once():
    ray = StandIn(lambda name, tried: (3, RayError("lost")) if int(name) % 7 == 0 and tried == 1 else None)
    rows, ends = flown(ray, [job(str(number), 8) for number in range(210)])
    assert len(rows) == len({(r.kernel, r.id) for r in rows}) == 210 * 8
    assert {r.verdict for r in rows} == {"passed"}
    assert ends == {"done": 210, "lost": 30}
    assert ray.most == 3 * TASKS_PER_SLOT


def test_the_fourth_try_is_not_made():
    ray = StandIn(lambda name, _tried: (1, RayTaskError(ForkServerLostError("gone"))) if name == "bad" else None)
    rows, ends = flown(ray, [job("bad", 8), job("good", 8)])
    verdicts = Counter((r.kernel, r.verdict) for r in rows)
    assert verdicts == {("good", "passed"): 8, ("bad", "passed"): MAX_LOSSES, ("bad", "crashed"): 8 - MAX_LOSSES}
    assert ends == {"done": 1, "lost": MAX_LOSSES}


def test_a_node_that_goes_before_a_task_began_is_not_the_kernels_fault():
    ray = StandIn(lambda _name, tried: (0, TaskUnschedulableError("gone")) if tried < 6 else None)
    rows, _ends = flown(ray, [job("one", 2)])
    assert [r.verdict for r in rows] == ["passed"] * 2


def test_a_fork_server_that_does_not_start_is_not_the_kernels_fault_and_many_end_the_run():
    failure = RayTaskError(NoForkServerError("it did not answer within 120 s"))
    ray = StandIn(lambda _name, tried: (0, failure) if tried < MAX_FAILED_STARTS else None)
    rows, ends = flown(ray, [job("one", 2)])
    assert [r.verdict for r in rows] == ["passed"] * 2
    assert ends == {"not started": MAX_FAILED_STARTS - 1, "done": 1}
    with pytest.raises(OpforgeError, match=r"could not start a fork server, 10 times now: .* 120 s; .*--resume"):
        flown(StandIn(lambda _name, _tried: (0, failure)), [job("one", 2)])


def test_what_a_user_can_mend_ends_the_run():
    ray = StandIn(lambda _name, _tried: (0, RayTaskError(OpforgeError("node n has torch 1"))))
    with pytest.raises(OpforgeError, match="node n has torch 1"):
        flown(ray, [job("one", 2)])


def test_what_was_built_on_a_node_is_timed_there_if_it_can_be():
    ray = StandIn(lambda _name, _tried: None)
    timed = [Case.make("relu.default", "((T([3], f32),), {})", phase=phase) for phase in Phase]
    jobs = [
        Job(Kernel(file, "relu.default", (), f"/nowhere/{file}"), (OperatorCases("relu.default", True, timed),))
        for file in ("one.cpp", "two.py")
    ]
    flow = Scheduler(
        ray, Placement(gpu=True), 1000, lambda _rows: None, io.StringIO(), 60.0, lambda: [Node(HOME, "", 2, 1)]
    )
    for phase in Phase:
        flow.run(jobs, phase, None)
    assert [one and (one.node_id, one.soft) for one in ray.asked] == [None, None, (HOME, True), None]


def test_chunks_are_cut_between_operators_and_know_the_whole_job():
    whole = job("big", MAX_TASK_CASES - 100, ("add.Tensor", "sub.Tensor", "mul.Tensor"))
    cut = list(split_job(whole, Phase.CORRECTNESS))
    assert [[part.op for part in chunk.operators] for chunk in cut] == [["add.Tensor"], ["sub.Tensor"], ["mul.Tensor"]]
    assert {chunk.all_ops for chunk in cut} == {("add.Tensor", "sub.Tensor", "mul.Tensor")}
    assert [
        len(chunk.operators) for chunk in split_job(job("small", 5, ("add.Tensor", "sub.Tensor")), Phase.CORRECTNESS)
    ] == [2]
    assert not list(split_job(whole, Phase.PERFORMANCE))
