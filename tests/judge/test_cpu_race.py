"""Real races on the CPU: two workers of the fork server, ATen in one and a kernel, or ATen too, in the other."""

from __future__ import annotations

import textwrap
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from opforge.cases import Case, Phase
from opforge.cases.case import Expect
from opforge.cases.tensors import Renewal, renewed
from opforge.judge import kernel_worker
from opforge.judge.batch import Batch, CaseRow
from opforge.judge.extra_checks import recheck_in_new_process
from opforge.judge.kernel_worker import KernelWorker, WorkerConfig, WorkerDiedError
from opforge.judge.reference import aten
from opforge.judge.roofline.peaks import load_or_measure
from opforge.judge.timing import cpu_race
from opforge.judge.timing.case_timer import CaseTimer
from opforge.judge.timing.cpu_race import BUSY_NOTE, CpuRace
from opforge.judge.timing.gpu_race import BaselineError, GpuRace, Side
from opforge.judge.verdict import RejectedError, Verdict, VerdictKind
from opforge.ops import table
from opforge.sandbox.host.reply import AllocateReply, MalformedReplyError
from opforge.sandbox.host.request import HostRunRequest, ResultRequest
from tests.conftest import SHORT_RACE_S, slow

CPU = torch.device("cpu")
UNARY = "((T([64, 64], f32),), {})"
PRODUCT = "((T([256, 256], f32), T([256, 256], f32)), {})"
TIMES = {"kernel_us", "aten_us", "speedup", "low", "high", "rounds", "set_aside", "calls"}
CHOLESKY = """
    import torch
    def linalg_cholesky_kernel_impl(self, *, upper=False):
        factor = torch.zeros_like(self)
        for i in range(len(self)):
            rest = self[i, i] - factor[i, :i].square().sum()
            {check}
            factor[i, i] = rest.sqrt()
            below = self[i + 1 :, i] - factor[i + 1 :, :i] @ factor[i, :i]
            factor[i + 1 :, i] = below / factor[i, i]
        return factor
"""


class Ring:
    """Kernels in a worker of their own each, and ATen's worker beside them."""

    def __init__(self, spawner, folder: Path) -> None:
        self._folder = folder
        self._spawner = spawner
        self.config = WorkerConfig("cpu", 30.0, None, 512 << 20, 256 << 20, race_s=SHORT_RACE_S)
        self.racing = CaseTimer(spawner, self.config, None, load_or_measure(spawner, "cpu"))
        self._workers: list[KernelWorker] = []

    def worker(self, op: str, source: str | None = None) -> KernelWorker:
        """Return a worker that serves a kernel, or ATen."""
        name = op.split(".", maxsplit=1)[0]
        file = None
        if source is not None:
            file = self._folder / f"{name}_{len(self._workers)}.py"
            file.write_text(textwrap.dedent(source))
        worker = KernelWorker(self._spawner, self.config)
        self._workers.append(worker)
        kernel = {"file": file and str(file), "primary": op, "entries": [f"{name}_kernel_impl"], "name": name}
        assert "error" not in worker.ask({"do": "load", "kernel": kernel}, timeout_s=60)
        return worker

    def placed(self, op: str, text: str, contents=None):
        """Return a batch with one case; with contents for its first tensor, if they are given."""
        batch = Batch(table().get(op), CPU, self.config.input_bytes, {}, np.zeros(64 << 20, np.uint8))
        case = Case.make(op, text, phase=Phase.PERFORMANCE)
        row = CaseRow(case.id, text, "", Expect.RETURNS, Phase.PERFORMANCE, "")
        entry = batch.add(row)
        if contents is not None:
            at, nbytes = entry.input_rows[0][:2]
            batch._buffer[at : at + nbytes] = contents.numpy().view(np.uint8).ravel()
        return batch, entry

    def race(self, op: str, text: str, source: str | None = None, contents=None) -> Verdict:
        """Race a kernel, or ATen, that is known to be right on a case."""
        batch, entry = self.placed(op, text, contents)
        worker = self.worker(op, source)
        batch.copy_to(worker.arena_view)
        return self.racing.time_case(table().get(op), worker, batch, entry, Verdict(VerdictKind.PASSED), required=True)

    def asked_apart(self, op: str, source: str, entry, seed: int) -> Verdict | None:
        """Judge a kernel on contents with a seed, by itself."""
        file = self._folder / f"apart_{len(self._workers)}.py"
        file.write_text(textwrap.dedent(source))
        kernel = {
            "file": str(file),
            "primary": op,
            "entries": [f"{op.split('.', maxsplit=1)[0]}_kernel_impl"],
            "name": "apart",
        }
        worker = KernelWorker(self._spawner, self.config)
        return recheck_in_new_process(worker, self.config, kernel, table().get(op), entry, seed, required=True)

    def close(self) -> None:
        self.racing._end_baseline()
        for worker in self._workers:
            worker.close()


@pytest.fixture(scope="module")
def ring(shared_server, tmp_path_factory):
    ring = Ring(shared_server.spawner, tmp_path_factory.mktemp("kernels"))
    yield ring
    ring.close()


def near(verdict, ratio=1.0):
    """Whether a speedup is the ratio, as far as that can be asked on a machine that others use too."""
    figures = verdict.figures
    low, high, speedup = figures["speedup_low"], figures["speedup_high"], figures["speedup"]
    slower = BUSY_NOTE in verdict.notes and speedup < ratio
    return low <= ratio <= high or ratio / 1.5 < speedup < ratio * 1.5 or slower


def test_aten_against_itself_and_every_field(ring):
    verdict = ring.race("mm.default", PRODUCT)
    row = verdict.figures
    assert verdict.passed
    assert near(verdict)
    assert row["timed"] == "call"
    assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
    assert set(row["call"]) == TIMES
    assert {name: row[name] for name in ("kernel_us", "aten_us", "speedup", "rounds")} == {
        name: row["call"][name] for name in ("kernel_us", "aten_us", "speedup", "rounds")
    }
    assert (row["speedup_low"], row["speedup_high"]) == (row["call"]["low"], row["call"]["high"])
    assert row["rounds"] >= 5
    assert row["rounds"] + row["call"]["set_aside"] >= 10
    assert not {"device", "sync"} & set(row)
    assert set(row["sol"]) == {"bytes", "flops", "us", "bound", "kernel", "aten", "counted"}
    assert (row["sol"]["bytes"], row["sol"]["flops"]) == (3 * 4 * 256**2, 2 * 256**3)
    assert isinstance(row["clocks"], dict)
    assert row["clocks"]["load"] >= 0
    assert not {"alarm", "launch_bound"} & set(row)


@pytest.mark.parametrize(("call_us", "marked"), [(1000.0, True), slow(1e-6, False)])
def test_where_aten_takes_no_more_than_the_smallest_call_the_case_is_launch_bound(ring, monkeypatch, call_us, marked):
    monkeypatch.setattr(ring.racing, "peaks", replace(ring.racing.peaks, call_us=call_us))
    figures = ring.race("neg.default", "((T([1], f32),), {})").figures
    assert figures.get("launch_bound", False) is marked


def test_the_gradients_that_the_judge_asks_for_load_nothing_that_slows_later_calls(ring):
    source = """
        import sys
        def neg_kernel_impl(self):
            if "sympy" in sys.modules:
                raise RuntimeError("sympy is here")
            return 0 - self
    """
    batch, entry = ring.placed("neg.default", UNARY)
    worker = ring.worker("neg.default", source)
    batch.copy_to(worker.arena_view)
    (answer,) = worker.ask({"do": "gradient", "op": "neg.default", "case": entry.request().wire()})["results"]
    assert "T" in answer["returned"][0], answer
    (answer,) = worker.ask({"do": "call", "op": "neg.default", "cases": [entry.request().wire()]})["results"]
    assert "raised" not in answer, answer


def test_a_kernel_that_does_its_work_twice_is_half_as_fast(ring):
    source = """
        import torch
        def mm_kernel_impl(self, mat2):
            torch.mm(mat2, self)
            return torch.mm(self, mat2)
    """
    verdict = ring.race("mm.default", PRODUCT, source)
    assert verdict.passed
    assert near(verdict, 0.5)
    assert verdict.figures["speedup"] < 1 / 1.5  # however busy the machine is: it is never flattered


@pytest.mark.parametrize(
    ("op", "text"),
    [
        ("relu_.default", UNARY),
        slow("sqrt_.default", UNARY),
        slow("index_add_.default", "((T([9, 7], f64), 0, T([4], i64, low=0, high=9), T([4, 7], f64)), {})"),
        slow("add.out", "((T([64], f32), T([64], f32)), {'out': T([64], f32)})"),
        slow("neg.out", "((T([64], f32),), {'out': T([0], f32)})"),
        slow("sort.values", "((T([64], f32),), {'values': T([64], f32), 'indices': T([64], i64)})"),
        slow("bernoulli.default", "((T([64, 64], f32, low=0, high=1),), {})"),
        slow("rand_like.default", UNARY),
        slow("add.Tensor", "((T([64, 64], i64), T([64, 64], i64)), {})"),
        slow("bitwise_not.default", "((T([64], b8),), {})"),
        slow("arange.default", "((100,), {})"),
        slow("cat.default", "(([T([8, 4], bf16), T([3, 4], bf16)],), {})"),
        slow("mul.Tensor", "((T([40, 30], c64, stride=(1, 40)), T([40, 1], c64)), {})"),
        slow("sum.default", "((T([0, 3], f32),), {})"),
        slow("embedding.default", "((T([10, 16], f32), T([5], i64, low=0, high=10)), {})"),
    ],
)
def test_operators_of_every_kind_are_timed(ring, op, text):
    verdict = ring.race(op, text)
    assert verdict.passed, verdict.reason
    assert set(verdict.figures.get("call", ())) == TIMES, verdict.notes
    assert verdict.figures["kernel_us"] > 0


def positive(size: int) -> torch.Tensor:
    """Return a positive matrix that is no longer one when its elements have moved on."""
    spread = torch.eye(size, dtype=torch.float64)
    return spread + 0.01 * torch.ones(size, size, dtype=torch.float64)


@pytest.mark.parametrize(
    "check",
    [
        None,
        "if rest <= 0: raise torch.linalg.LinAlgError('not positive')",
        "if rest <= 0: raise ArithmeticError('not positive')",
        "rest = rest.abs()",
    ],
    ids=["aten", "raises the same", "raises another", "does not raise"],
)
def test_where_aten_raises_on_new_contents_a_right_kernel_passes_and_is_not_timed(ring, check):
    source = None if check is None else CHOLESKY.replace("{check}", check)
    for _ in range(4):  # either side may come first
        verdict = ring.race("linalg_cholesky.default", "((T([6, 6], f64),), {})", source, positive(6))
        assert verdict.passed, verdict.reason
        assert "speedup" not in verdict.figures
        (note,) = verdict.notes
        assert note.startswith("not timed: ATen's own process: it raised "), note
        assert "positive-definite" in note


@pytest.mark.parametrize(
    "check",
    ["if rest <= 1e-12: raise torch.linalg.LinAlgError('not positive')", "rest = rest.abs() * (rest.abs() > 1e-12)"],
    ids=["raises", "has zero"],
)
def test_at_the_edge_of_what_aten_takes_rounding_is_nobodys_fault(ring, monkeypatch, check):
    edge = positive(6).flatten().roll(22).view(6, 6)
    factor, raises = torch.linalg.cholesky_ex(edge)
    assert raises or 0 < float(factor[5, 5]) < 1e-8  # by the order of its additions
    monkeypatch.setattr(Renewal, "contents", lambda self, seeds: [self.words] * len(seeds))
    monkeypatch.setattr(aten, "renewed", lambda tensor, _seed, **_: tensor)
    verdict = ring.race("linalg_cholesky.default", "((T([6, 6], f64),), {})", CHOLESKY.replace("{check}", check), edge)
    assert verdict.passed, verdict.reason
    (note,) = verdict.notes
    assert note.startswith("not timed: ATen's own process: it raised "), note
    assert raises or note.endswith("(contents moved by a rounding step)")


def test_a_wrong_timed_result_is_no_less_wrong_where_aten_takes_no_float64(ring):
    source = """
        import torch
        def mkldnn_convolution_kernel_impl(self, weight, bias, padding, stride, dilation, groups):
            return torch.zeros(1, 3, 3, 3)
    """
    call = "((T([1, 2, 5, 5], f32), T([3, 2, 3, 3], f32), None, [0, 0], [1, 1], [1, 1], 1), {})"
    verdict = ring.race("mkldnn_convolution.default", call, source)
    assert verdict.kind is VerdictKind.CHEATED, verdict
    assert "an output of a timed call is wrong" in verdict.reason


def test_a_kernel_that_raises_after_many_calls_is_wrong(ring):
    source = """
        import torch
        calls = [0]
        def neg_kernel_impl(self):
            calls[0] += 1
            if calls[0] > 100:
                raise ValueError("enough is enough")
            return -self
    """
    verdict = ring.race("neg.default", UNARY, source)
    assert verdict.kind is VerdictKind.WRONG
    assert verdict.reason.startswith("raised in a timed call: ValueError: enough is enough")
    assert near(ring.race("neg.default", UNARY))  # ATen's worker goes on


@pytest.mark.slow
def test_a_kernel_whose_process_ends_after_many_calls_crashed_and_atens_worker_goes_on(ring):
    source = """
        import os
        calls = [0]
        def neg_kernel_impl(self):
            calls[0] += 1
            if calls[0] > 100:
                os._exit(0)
            return -self
    """
    with pytest.raises(WorkerDiedError) as death:
        ring.race("neg.default", UNARY, source)
    assert death.value.kind is VerdictKind.CRASHED
    afterwards = ring.race("neg.default", UNARY)
    assert "speedup" in afterwards.figures, afterwards
    assert near(afterwards)


@pytest.mark.parametrize(
    ("op", "late"), [slow("neg.default", "torch.empty_like(self)"), ("bernoulli.default", "self[:1]")]
)
def test_results_of_timed_calls_are_judged_those_of_random_operators_by_their_contract(ring, op, late):
    base = op.removesuffix(".default")
    source = f"""
        import torch
        calls = [0]
        def {base}_kernel_impl(self, *, generator=None):
            calls[0] += 1
            return torch.{base}(self) if calls[0] < 100 else {late}
    """
    verdict = ring.race(op, "((T([64, 64], f32, low=0, high=1),), {})", source)
    assert verdict.kind is VerdictKind.CHEATED
    assert verdict.reason.startswith("an output of a timed call is wrong: ")


@pytest.mark.slow
def test_both_the_last_of_the_timed_calls_and_an_earlier_one_are_looked_at(ring):
    shared = """
        import torch
        calls, kept = [0], {}
        def neg_kernel_impl(self):
            calls[0] += 1
            result = kept.setdefault(self.shape, torch.empty_like(self)) if calls[0] > 50 else torch.empty_like(self)
            return torch.sub(0, self, out=result)
    """
    for _ in range(6):  # whichever side comes first in each
        verdict = ring.race("neg.default", UNARY, shared)
        assert verdict.kind is VerdictKind.CHEATED


def test_malformed_replies_are_refused(ring):
    source = """
        import torch
        import opforge.sandbox.guest.worker as worker
        worker.Worker._timed_result = lambda self, request: {"result": 5}
        def neg_kernel_impl(self):
            return -self
    """
    verdict = ring.race("neg.default", UNARY, source)
    assert verdict.kind is VerdictKind.CONTRACT
    assert "reply is malformed" in verdict.reason
    verdict = ring.race(
        "neg.default", UNARY, source.replace("_timed_result", "_run_timed_calls").replace("result", "raised")
    )
    assert (verdict.kind, verdict.reason) == (VerdictKind.WRONG, "raised in a timed call: 5")


def state(worker: KernelWorker) -> str:
    """Return the letter that the system has for what a process does; T is stopped."""
    return Path(f"/proc/{worker._pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_while_one_side_runs_the_other_is_stopped_and_both_run_afterwards(ring):
    batch, entry = ring.placed("mm.default", PRODUCT)
    sides = [ring.worker("mm.default") for _ in range(2)]
    for worker in sides:
        batch.copy_to(worker.arena_view)
    stopped = []

    def watch() -> None:
        until = time.monotonic() + 10  # a signal is heeded when the process is next given a core
        while (states := [state(worker) for worker in sides]).count("T") != 1 and time.monotonic() < until:
            time.sleep(0.001)
        stopped.append(tuple(letter == "T" for letter in states))

    row = CpuRace(
        *sides, "mm.default", entry, None, writes_inputs=False, race_s=SHORT_RACE_S, sample_device=watch
    ).run()
    assert row["rounds"] >= 5
    assert set(stopped) == {(True, False), (False, True)}
    assert "T" not in [state(worker) for worker in sides]
    assert all("results" in w.ask({"do": "call", "op": "mm.default", "cases": [entry.request().wire()]}) for w in sides)


EDGE = """
    import torch
    kept = []
    def neg_kernel_impl(self):
        kept.append(self.clone())
        return 0 - {what}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "honest"),
    [
        ("(self if self.argmax() else self * 2)", False),  # wrong wherever the largest element is the first
        ("(kept[0] if len(kept) > 1 else self)", True),  # right in a first call, and wrong in all others
    ],
)
def test_who_is_wrong_on_such_contents_untimed_too_is_wrong_and_no_cheat(ring, what, honest):
    _, entry = ring.placed("neg.default", "((T([9], f32),), {})")
    contents = entry.call.build_arguments()[2][0]
    found = {turn: ring.asked_apart("neg.default", EDGE.format(what=what), entry, turn) for turn in range(1, 20)}
    for turn, verdict in found.items():
        first = int(renewed(contents.clone(), turn).argmax()) == 0
        assert verdict.passed == (honest or not first), (turn, verdict)
        if not verdict.passed:
            assert verdict.kind is VerdictKind.WRONG
            assert verdict.reason.startswith("with other contents, as in timed calls: result: ")


@pytest.mark.parametrize("plainly", ["wrong", "passed", slow("unsupported"), slow("error"), slow(None)])
def test_the_verdict_on_a_wrong_output_of_a_timed_call(ring, monkeypatch, plainly):
    monkeypatch.setattr(cpu_race, "drawn_seeds", lambda count: [5] * count)
    batch, entry = ring.placed("neg.default", "((T([9], f32),), {})")
    late = "import torch\nn = 0\ndef neg_kernel_impl(self):\n    global n\n    n += 1\n    return 0 - self * (1 if n < 40 else 2)\n"
    worker = ring.worker("neg.default", late)
    batch.copy_to(worker.arena_view)
    turns = []

    def apart(turn):
        turns.append(turn)
        return None if plainly is None else Verdict(VerdictKind(plainly), "by itself")

    neg = table().get("neg.default")
    found = ring.racing.time_case(neg, worker, batch, entry, Verdict(VerdictKind.PASSED), required=True, recheck=apart)
    assert turns == [5]
    assert found.kind is (VerdictKind.WRONG if plainly == "wrong" else VerdictKind.CHEATED)


@pytest.mark.parametrize("text", [pytest.param(UNARY, id="small"), slow("((T([2200, 2200], f32),), {})", id="large")])
def test_chance_decides_which_results_are_judged(ring, monkeypatch, text):
    begin, asked = KernelWorker.begin, []

    def noting(worker, request):
        if worker is kernel and isinstance(request, HostRunRequest | ResultRequest):
            asked.append(request)
        begin(worker, request)

    batch, entry = ring.placed("neg.default", text)
    kernel = ring.worker("neg.default")
    batch.copy_to(kernel.arena_view)
    monkeypatch.setattr(KernelWorker, "begin", noting)
    neg = table().get("neg.default")
    found = []
    for _ in range(2):
        asked.clear()
        assert ring.racing.time_case(neg, kernel, batch, entry, Verdict(VerdictKind.PASSED), required=True).passed
        shown = [request.call for request in asked if isinstance(request, ResultRequest)]
        assert shown, "one in any case"
        assert len(shown) <= 2 * sum(isinstance(request, HostRunRequest) for request in asked)
        found.append(shown)
    if text == UNARY:
        assert found[0] != found[1]
        assert len(set(found[0])) > 5


SKIPS = """
    import torch
    calls = 0
    def neg_kernel_impl(self):
        global calls
        calls += 1
        return torch.empty_like(self) if calls % 8 == 0 and calls > 60 else 0 - self
"""
BATCHES = """
    import torch
    waiting = []
    def neg_kernel_impl(self):
        result = torch.empty_like(self)
        waiting.append((self, result))
        if len(waiting) == {count}:
            for source, target in waiting:
                torch.sub(0, source, out=target)
            waiting.clear()
        return result
"""


def test_a_kernel_that_leaves_out_one_call_in_eight_is_found_out(ring):
    assert ring.race("neg.default", UNARY, SKIPS).kind is VerdictKind.CHEATED


def test_a_kernel_that_does_its_work_at_the_end_of_a_block_is_found_out(ring, monkeypatch):
    monkeypatch.setattr(cpu_race, "_MAX_CALLS", 64)
    monkeypatch.setattr(cpu_race, "_FIRST_CALLS", 64)
    monkeypatch.setattr(cpu_race, "_BLOCK_NS", 1e12)  # as many calls however slow a busy machine is
    verdict = ring.race("neg.default", UNARY, BATCHES.replace("{count}", "64"))
    assert verdict.kind is VerdictKind.CHEATED, verdict
    assert "when its call had returned" in verdict.reason


def test_results_that_are_made_after_the_block_are_found_out(ring):
    source = """
        import torch
        import opforge.sandbox.guest.worker as worker
        waiting = []
        result = worker.HostTimedCalls.result
        def late(timed_calls, call):
            for source, target in waiting:
                torch.sub(0, source, out=target)
            return result(timed_calls, call)
        worker.HostTimedCalls.result = late
        def neg_kernel_impl(self):
            result = torch.empty_like(self)
            waiting.append((self, result))
            return result
    """
    verdict = ring.race("neg.default", UNARY, source)
    assert verdict.kind is VerdictKind.CHEATED
    assert "wrong" in verdict.reason


def test_a_timed_call_that_changes_its_input_is_found_out(ring):
    source = """
        import torch
        calls = 0
        def neg_kernel_impl(self):
            global calls
            calls += 1
            result = 0 - self
            return result if calls < 50 else (self.zero_(), result)[1]
    """
    verdict = ring.race("neg.default", UNARY, source)
    assert (verdict.kind, verdict.reason) == (VerdictKind.CONTRACT, "a timed call changed its input 0")


def test_a_process_that_is_started_in_timed_calls_is_found_out(ring):
    source = """
        import os, time
        calls = 0
        def neg_kernel_impl(self):
            global calls
            calls += 1
            if calls == 50 and os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    time.sleep(60)
                os._exit(0)
            return 0 - self
    """
    verdict = ring.race("neg.default", UNARY, source)
    assert verdict.kind is VerdictKind.CHEATED
    assert "process(es) running that it had started in timed calls" in verdict.reason


def test_a_kernel_that_leaves_its_core_is_found_out(ring):
    source = """
        import os
        def neg_kernel_impl(self):
            os.sched_setaffinity(0, range(os.cpu_count()))
            return 0 - self
    """
    verdict = ring.race("neg.default", UNARY, source)
    assert (verdict.kind, verdict.reason) == (
        VerdictKind.CHEATED,
        "runs on other cores than the one on which it is timed",
    )


def test_a_kernel_that_fakes_the_counter_of_cases_uses_up_its_time_limits_all_the_same(ring, monkeypatch):
    source = """
        import struct, sys, time
        def relu_kernel_impl(self):
            frame = sys._getframe()
            while not hasattr(frame.f_locals.get("self"), "_arena"):
                frame = frame.f_back
            arena = frame.f_locals["self"]._arena
            for number in range(1 << 30):
                arena[:8] = struct.pack("<Q", number)
                time.sleep(0.01)
    """
    monkeypatch.setattr(kernel_worker, "_MIN_REQUEST_LIMIT_S", 1.6)
    batch, entry = ring.placed("relu.default", "((T([4], f32),), {})")
    worker = ring.worker("relu.default", source)
    batch.copy_to(worker.arena_view)
    worker.begin({"do": "call", "op": "relu.default", "random": False, "cases": [entry.request().wire()]})
    with pytest.raises(WorkerDiedError) as death:
        worker.answer(timeout_s=0.4, cases=100)
    assert (death.value.kind, death.value.timeouts) == (VerdictKind.TIMED_OUT, 4)


def test_that_atens_process_does_not_stop_is_no_fault_of_the_kernels(ring, monkeypatch):
    worker = ring.worker("neg.default")
    monkeypatch.setattr(kernel_worker, "_HALT_LIMIT_S", -1.0)
    monkeypatch.setattr(kernel_worker.linux, "is_stopped", lambda _pid: False)
    with pytest.raises(BaselineError, match="does not stop"):
        Side(worker, is_kernel=False).pause_and_wait()
    with pytest.raises(WorkerDiedError, match="does not stop"):
        Side(ring.worker("neg.default"), is_kernel=True).pause_and_wait()


@pytest.mark.parametrize("place", [["ab" * 64, 0], None, "there", ["", 0.5]])
def test_places_of_inputs_that_cannot_be_are_refused(ring, place):
    _, entry = ring.placed("neg.default", UNARY)
    worker = ring.worker("neg.default")
    race = GpuRace(worker, worker, "neg.default", entry, None, CPU, writes_inputs=False, race_s=SHORT_RACE_S)
    with pytest.raises((RejectedError, MalformedReplyError)):
        race._map_inputs(race._kernel, AllocateReply.from_wire({"inputs": [[place]]}, 1, 1).inputs[0])


def test_an_operator_that_changes_its_arguments_geometry_is_judged_and_not_timed(judge_tiny):
    ended = judge_tiny(None, {"unsqueeze_.default": ["((T([2, 3], f32), 1), {})"]}, performance=True)
    correctness, performance = sorted(ended.store.rows(), key=lambda row: row.phase)
    assert [row.verdict for row in (correctness, performance)] == ["passed", "passed"]
    assert any(note.startswith("not timed: it changes only") for note in performance.notes)
    assert not any("not timed" in note for note in correctness.notes)
