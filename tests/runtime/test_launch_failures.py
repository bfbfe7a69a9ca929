"""What can go wrong in a replay: a right answer or a clear error, and the next call is right again."""

from __future__ import annotations

import resource
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import opforge
from opforge.runtime import learning
from opforge.runtime.dispatch import INSTALL_LOCK, KernelWarning
from opforge.runtime.native import recording
from opforge.runtime.native.building import SOURCES
from opforge.runtime.native_slots import NativeSlot
from tests.runtime import standin
from tests.runtime.random_calls import replayed
from tests.runtime.test_launch_plans import enabled as enabled  # noqa: PLC0414
from tests.runtime.test_launch_plans import gpu as gpu  # noqa: PLC0414
from tests.runtime.test_launch_plans import libcuda as libcuda  # noqa: PLC0414
from tests.runtime.test_native_slots import holds_in_fork

ERRORS = [
    *range(1, 9), 34, 36, 46, *range(100, 103), *range(200, 203), *range(205, 227), *range(300, 305), *range(400, 403),
    500, 600, *range(700, 722), *range(800, 813), *range(900, 918), 999,
]  # fmt: skip
"""All codes of CUresult in CUDA 13, with those that are not given out between them."""
PLAN_ONLY = {1, 200, 201, 209, 400, 500, 701, 720}
"""Errors that concern a plan, and not the GPU."""


def right(result, value):
    return torch.equal(result, value * -1.0)  # without a call of neg


def test_the_errors_that_concern_a_plan_are_those_of_the_driver():
    source = (
        (SOURCES / "driver.h").read_text(encoding="utf-8").partition("concerns_plan_only")[2].partition("return")[0]
    )
    assert {int(word.strip(",;")) for word in source.split() if word.strip(",;").isdigit()} == PLAN_ONLY


def test_every_error_of_a_launch_is_answered_or_raised(enabled, gpu, monkeypatch):
    """Each has a geometry and a plan of its own."""
    monkeypatch.setattr(learning, "_ALL_NOTED", len(ERRORS))
    made = enabled("neg")
    values = {error: torch.arange(1.0, 2.0 + number) for number, error in enumerate(ERRORS)}
    for value in values.values():
        torch.neg(value)
    assert made.learn()["neg.default"] == {"plans": len(ERRORS), "refused": {}}
    served = len(ERRORS)
    for error, value in values.items():
        gpu.library.standin_fail_with(error)
        if error in PLAN_ONLY:
            assert right(torch.neg(value), value), error
        else:
            with pytest.raises(RuntimeError, match="the CUDA driver refused a kernel's launch: CUDA_ERROR_STAND_IN"):
                torch.neg(value)
        assert right(torch.neg(value), value), error  # by Python: the plan is dropped
        served += 1 + (error in PLAN_ONLY)
        row = made.counters()["neg.default"]
        assert (row["served"], row["aten"], row["replayed"]) == (served, {}, 0), error


def test_an_error_that_stays_is_not_hidden(enabled, gpu):
    """On a GPU, ATen's kernel fails like any other. Here, ATen's kernel is the CPU's, and answers."""
    value = torch.arange(100.0)
    made = enabled("neg")
    torch.neg(value)
    made.learn()
    gpu.library.standin_fail_later(700, 0, 1)
    try:
        with pytest.raises(RuntimeError, match="refused a kernel's launch"):
            torch.neg(value)
        with pytest.warns(KernelWarning, match="was removed"):
            assert right(torch.neg(value), value)
    finally:
        gpu.library.standin_fail_with(0)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_fill_or_a_launch_after_it_may_fail(enabled, gpu, failing):
    """The kernel fills its result with zeros, and then launches."""
    one, other = torch.arange(100.0), torch.ones(100)
    for error in (701, 700):
        with enabled("add") as made:
            torch.add(one, other)
            assert made.learn()["add.Tensor"]["plans"] == 1
            gpu.library.standin_fail_later(error, failing, 0)
            if error == 701:
                assert torch.equal(torch.add(one, other), torch.arange(1.0, 101.0))
            else:
                with pytest.raises(RuntimeError, match="refused a kernel's launch"):
                    torch.add(one, other)
            assert torch.equal(torch.add(one, other), torch.arange(1.0, 101.0))


TWICE = """
def add__kernel_impl(self, other, *, alpha=1):
    for _ in range(2):
        strided_add_to[(triton.cdiv(self.numel(), 64),)](
            self, other, self.numel(), self.stride(0), other.stride(0), float(alpha), BLOCK=64)
    return self
"""


def test_what_was_written_before_a_failure_is_not_written_again(enabled, gpu):
    """Python cannot answer a call whose tensor has been changed already."""
    made = enabled(add_=standin.KERNELS["add_"].partition("def add_")[0] + TWICE)
    target, one = torch.zeros(100), torch.ones(100)
    target.add_(one)
    assert made.learn()["add_.Tensor"]["plans"] == 1
    assert torch.equal(target.add_(one), torch.full((100,), 4.0))
    gpu.library.standin_fail_later(701, 1, 0)
    with pytest.raises(RuntimeError, match="refused a kernel's launch"):
        target.add_(one)
    target.add_(one)
    made.learn()
    gpu.library.standin_fail_with(701)
    assert torch.equal(torch.zeros(100).add_(one), torch.full((100,), 2.0))


def test_memory_that_runs_out_is_torchs_own_error(enabled):
    """Each result takes 4 MiB, and 16 MiB may be added to what the process has."""
    made = enabled("add")
    value = torch.ones(1).expand(1 << 20)
    torch.add(value, value)
    assert made.learn()["add.Tensor"]["plans"] == 1

    def fails_and_goes_on():
        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 24), resource.RLIM_INFINITY))
        kept = []
        try:
            while len(kept) < 10_000:
                kept.append(torch.add(value, value))
        except RuntimeError as error:
            count = len(kept)
            kept.clear()
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            result = torch.add(value, value)
            row = made.counters()["add.Tensor"]
            counts = row["replayed"] == count + 1 and row["served"] == count + 2
            return counts and "DefaultCPUAllocator" in str(error) and result[-1].item() == 2
        return False

    assert holds_in_fork(fails_and_goes_on)


def test_threads_replay_while_kernels_come_and_go(enabled, kernels):
    """Plans are made, replayed and forgotten by eight threads at once; every answer is right, and all are counted."""
    made = enabled("neg", "add")
    ready, wrong, calls = threading.Barrier(9), [], 150

    def work(number):
        values = [torch.arange(10.0 * (number % 4 + 1)) + i for i in range(4)]
        ready.wait()
        for i in range(calls):
            value = values[i % 4]
            if not right(torch.neg(value), value) or not torch.equal(torch.add(value, value), value * 2):
                wrong.append((number, i))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    ready.wait()
    others = []
    root = kernels({"neg": standin.KERNELS["neg"]}, folder="others")
    while any(thread.is_alive() for thread in threads):
        made.learn()
        with opforge.enabled(root, device="cpu", policy="all", learn="request") as other:
            other.learn()
            others.append(other)
    for thread in threads:
        thread.join()
    assert not wrong
    assert made.counters()["add.Tensor"]["served"] == 8 * calls
    assert sum(each.counters()["neg.default"]["served"] for each in (made, *others)) == 8 * calls


def test_a_call_that_asks_python_while_another_thread_learns_is_replayed_with_its_own_tensors(enabled, monkeypatch):
    """To ask moves the arguments in memory. Unless they are looked up again, the process crashes."""
    made = enabled("neg")
    value, decide = torch.arange(100.0), NativeSlot.decide

    def decide_while_another_learns(*given):
        monkeypatch.setattr(NativeSlot, "decide", decide)
        other = threading.Thread(target=lambda: (torch.neg(value), made.learn()))
        other.start()
        other.join()
        return decide(*given)

    monkeypatch.setattr(NativeSlot, "decide", decide_while_another_learns)
    assert holds_in_fork(lambda: right(torch.neg(value), value) and replayed(made) == 1)


def test_backward_threads_replay(enabled):
    made = enabled("neg")
    weight = torch.arange(100.0)

    class Negated(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, grad):
            assert threading.current_thread() is not threading.main_thread() or torch._C._current_graph_task_id() >= 0
            return torch.neg(grad)

    expected = weight * -1.0

    def gradient():
        leaf = torch.ones(100, requires_grad=True)
        (Negated.apply(leaf) * weight).sum().backward()
        return leaf.grad

    assert torch.equal(gradient(), expected)
    made.learn()
    wrong = []
    threads = [
        threading.Thread(target=lambda: torch.equal(gradient(), expected) or wrong.append(gradient())) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert replayed(made) == 8


def test_a_child_forked_while_threads_replay_and_learn_goes_on(enabled, monkeypatch):
    monkeypatch.setattr(learning, "_NOTED_SHARE", 1.0)  # of many calls, too
    made = enabled("neg")
    value, stop = torch.arange(100.0), threading.Event()
    torch.neg(value)
    made.learn()

    def work(number):
        while not stop.is_set():
            torch.neg(value)
            torch.neg(torch.arange(float(number)))

    def goes_on():
        before = replayed(made)
        answers = [right(torch.neg(value), value) for _ in range(3)]
        torch.neg(value[:7])
        made.learn()
        answers.append(right(torch.neg(value[:7]), value[:7]))
        return all(answers) and replayed(made) == before + 4

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            assert holds_in_fork(goes_on)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_child_forked_while_a_kernel_is_recorded_can_record(enabled):
    made = enabled("neg")
    torch.neg(torch.arange(100.0))

    def learns():
        return made.learn()["neg.default"] == {"plans": 1, "refused": {}}

    with recording._patch_lock:  # as another thread holds it while it records
        assert holds_in_fork(lambda: torch.neg(torch.arange(100.0)) is not None and learns())


def test_a_child_forked_while_kernels_are_installed_can_install(enabled):
    """An installation holds its lock for as long as kernels compile."""
    made = enabled("neg")
    held, release = threading.Event(), threading.Event()

    def hold():
        with INSTALL_LOCK:
            held.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        assert holds_in_fork(lambda: made.disable() is None and right(torch.neg(torch.ones(4)), torch.ones(4)))
    finally:
        release.set()
        thread.join()


def test_out_tensors_that_share_memory_by_another_name_are_answered_as_by_aten(enabled):
    """NumPy's memory has a name of its own in each tensor, so the geometry does not tell that it is shared."""
    made = enabled("add")

    def summed(offset):
        memory = np.arange(200, dtype=np.float32)
        one, out = torch.from_numpy(memory[:100]), torch.from_numpy(memory[offset : offset + 100])
        return torch.add(one, torch.ones(100), out=out).tolist()

    torch.add(torch.zeros(100), torch.ones(100), out=torch.zeros(100))
    summed(100)
    made.learn()
    answers = [summed(offset) for offset in (100, 1, 0)]
    made.disable()
    assert answers == [summed(offset) for offset in (100, 1, 0)]


def test_the_thread_leaves_what_is_made_on_request(kernels, gpu):
    """Else it would launch at any time, such as while the user captures a CUDA graph."""
    background = kernels({"neg": standin.KERNELS["neg"]}, folder="background")
    request = kernels({"add": standin.KERNELS["add"]}, folder="request")
    changed = learning.LEARNER._changed
    with (
        opforge.enabled(background, device="cpu", policy="all") as one,
        opforge.enabled(request, device="cpu", policy="all", learn="request") as other,
    ):
        torch.neg(torch.arange(10.0))
        one.learn()
        torch.add(torch.arange(10.0), torch.ones(10))
        torch.neg(torch.arange(11.0))
        with changed:
            assert changed.wait_for(lambda: len(learning.LEARNER._queue) == 1 and not learning.LEARNER._working, 60)
        assert "replayed" not in other.counters()["add.Tensor"]
        assert other.learn()["add.Tensor"]["plans"] == 1
