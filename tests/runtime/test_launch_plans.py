"""Launch plans without a GPU: Triton compiles as for one, and a stand-in for its driver runs the blocks."""

from __future__ import annotations

import os

import pytest
import torch
from triton.runtime import driver

import opforge
import opforge.errors
from opforge.runtime import autoload, learning
from opforge.runtime.native import binding
from tests.runtime import standin

ROW = {
    "rank": [0, 2], "numel": [0, 4096], "layouts": ["contiguous", "empty", "strided", "scalar", "expanded", "offset"],
    "timed": [[0, 4096, True]],
}  # fmt: skip


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory):
    return standin.build(tmp_path_factory.mktemp("standin"))


@pytest.fixture
def gpu(libcuda, monkeypatch):
    """Return a stand-in for a GPU's driver, which Triton and the native runtime use."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(learning, "DEVICE_TYPES", {"cpu"})
    monkeypatch.setattr("opforge.runtime.enabling.DEVICE_TYPES", {"cpu"})
    binding.load().load_driver(str(libcuda))
    made = standin.Driver(libcuda)
    driver.set_active(made)
    yield made
    driver.set_active(standin.AfterStandIn())


@pytest.fixture
def enabled(kernels, gpu):
    """Return a function that enables kernels; plans are made on request."""

    def enable(*ops, **sources):
        root = kernels({**{op: standin.KERNELS[op] for op in ops}, **sources})
        return opforge.enable(root, device="cpu", policy="all", learn="request")

    return enable


def same_bits(one, other):
    return torch.equal(one.view(torch.int32), other.view(torch.int32)) and one.stride() == other.stride()


def test_a_plan_replays_the_kernel_without_python(enabled, gpu, monkeypatch):
    made = enabled("neg")
    first = torch.neg(torch.arange(100.0))
    assert made.learn()["neg.default"] == {"plans": 1, "refused": {}}
    monkeypatch.setattr("opforge.runtime.native_slots._PythonPart._run", None)
    before = gpu.library.standin_launches()
    for _ in range(3):
        assert same_bits(torch.neg(torch.arange(100.0)), first)
    assert gpu.library.standin_launches() == before + 3
    assert made.counters()["neg.default"] | {"kernel": ""} == {"kernel": "", "served": 4, "aten": {}, "replayed": 3}
    rows = [line.split() for line in autoload._report("a_pack", made, 1)]
    assert ["neg.default", "neg_implementation_1", "4", "3", "0"] in rows


def test_numbers_strides_aliases_and_offsets_have_plans_of_their_own(enabled, gpu):
    """A call whose geometry differs in one part from that of a plan is answered by Python, and then by a plan of its own."""
    made = enabled("mul", "add")
    base = torch.arange(600.0)
    calls = [
        lambda: torch.mul(base[:100], 2.0),
        lambda: torch.mul(base[:100], 3.0),
        lambda: torch.mul(base[:100], 3),
        lambda: torch.mul(base[:101], 3.0),
        lambda: torch.mul(base[1:101], 3.0),
        lambda: torch.mul(base[4:104], 3.0),
        lambda: torch.mul(base[:100].view(10, 10), 3.0),
        lambda: torch.add(base[:100], base[100:200]),
        lambda: torch.add(base[:100], base[200:300]),
        lambda: torch.add(base[:100], base[:100]),
        lambda: torch.add(base[:100], torch.ones(100)),
        lambda: torch.add(base[:200:2], torch.ones(100)),
        lambda: torch.add(base[:100], torch.ones(1).expand(100)),
    ]
    expected = [call() for call in calls]
    report = made.learn()
    assert report["mul.Tensor"] == {"plans": 7, "refused": {}}
    assert report["add.Tensor"] == {"plans": 6, "refused": {}}
    launches = gpu.library.standin_launches()
    for call, result in zip(calls, expected, strict=True):
        assert same_bits(call(), result)
    assert gpu.library.standin_launches() == launches + len(calls)
    counters = made.counters()
    assert (counters["mul.Tensor"]["replayed"], counters["add.Tensor"]["replayed"]) == (7, 6)
    assert (counters["mul.Tensor"]["served"], counters["add.Tensor"]["served"]) == (14, 12)


HELPERS = """
import ctypes, itertools

CACHE, OTHER, COUNT = {}, torch.zeros(4096), itertools.count()

def launch(source, target, factor):
    scaled[(triton.cdiv(target.numel(), 64),)](source, target, target.numel(), float(factor), BLOCK=64)

def is_recorded():
    return torch._C._len_torch_dispatch_stack() > 0

def copy_unseen(target, source):
    with torch.utils._python_dispatch._disable_current_modes():
        target.copy_(source)

def write_unseen(target):
    with torch._C.DisableTorchFunction():
        ctypes.memset(target.data_ptr(), 7, 4)

def neg_kernel_impl(self):
"""


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return torch.empty_like(self).copy_(OTHER[:100])", "calls aten::copy_"),
        ("OTHER[:100].copy_(self); return torch.empty_like(self)", "calls aten::copy_"),
        ("self.zero_(); return torch.empty_like(self)", "writes an argument that the operator only reads"),
        ("self.copy_(torch.empty_like(self)); return self", "writes an argument that the operator only reads"),
        ("target = self.clone(); write_unseen(target); return target", "differs from the kernel"),
        ("target = self.clone(); copy_unseen(target, self * 2); return target", "calls aten::mul"),
        ("target = self.clone(); copy_unseen(target, self[:1].expand(100)); return target", "differs from the kernel"),
        ("return torch.full_like(self, next(COUNT))", "did not do the same"),
        ("return torch.empty_like(self).fill_(is_recorded())", "differs from the kernel"),
        ("torch.zeros(4, dtype=torch.complex64).fill_(1j); return self.clone()", "fills a tensor with 1j"),
        ("return torch.empty_like(self) if float(self.sum()) else self", "calls aten::sum"),
        ("return CACHE.setdefault(0, torch.empty_like(self))", "neither an argument of the call nor newly allocated"),
        ("self.data_ptr(); return torch.empty_like(self)", "calls Tensor.data_ptr"),
        ("launch(self, OTHER, 1.0); return torch.empty_like(self)", "neither the call's nor newly allocated"),
        ("target = torch.empty_like(self); launch(self, target, next(COUNT)); return target", "did not do the same"),
        (
            "target = torch.empty_like(self); launch(self, target, self.storage_offset()); return target",
            "did not do the same",
        ),
        (
            "target = torch.empty_like(self); launch(self.as_strided((50,), (1,), 9), target, 2.0); return target",
            "not do the same",
        ),
        ("target = torch.empty_like(self); launch(self, target[:8], 2.0); return target", "differs from the kernel"),
        ("target = torch.empty_like(self); launch(self, target, is_recorded() - 1.0); return target", "differs from"),
        ("target = torch.empty_like(self); write_unseen(target); return target", "launches nothing"),
        (
            "target = torch.empty_like(self); launch(self, target, 2.0); write_unseen(target); return target",
            "differs from",
        ),
    ],
)
def test_kernels_that_do_more_than_a_plan_can_say_have_none(enabled, body, reason):
    made = enabled(neg=standin.KERNELS["neg"].partition("def neg_kernel_impl")[0] + HELPERS + f"    {body}\n")
    torch.neg(torch.arange(108.0)[8:])
    report = made.learn()["neg.default"]
    assert report["plans"] == 0
    assert reason in " ".join(report["refused"])


def test_a_refused_launch_is_answered_by_python_and_the_plan_is_dropped(enabled, gpu):
    made = enabled("neg")
    expected = torch.neg(torch.arange(100.0))
    made.learn()
    gpu.library.standin_fail_with(701)
    assert same_bits(torch.neg(torch.arange(100.0)), expected)
    assert same_bits(torch.neg(torch.arange(100.0)), expected)
    assert made.counters()["neg.default"]["replayed"] == 0
    assert made.counters()["neg.default"]["served"] == 3


def test_an_error_that_ends_the_use_of_cuda_is_raised(enabled, gpu):
    made = enabled("neg")
    torch.neg(torch.arange(100.0))
    made.learn()
    gpu.library.standin_fail_with(700)
    with pytest.raises(RuntimeError, match="refused a kernel's launch: CUDA_ERROR_STAND_IN"):
        torch.neg(torch.arange(100.0))


def test_modes_have_plans_of_their_own(enabled):
    made = enabled("neg")
    value = torch.arange(100.0)
    torch.neg(value)
    assert made.learn()["neg.default"]["plans"] == 1
    with torch.no_grad():
        torch.neg(value)
        assert made.counters()["neg.default"]["replayed"] == 0
        made.learn()
        torch.neg(value)
        assert made.counters()["neg.default"]["replayed"] == 1
    torch.use_deterministic_algorithms(mode=True)
    try:
        torch.neg(value)
        assert made.counters()["neg.default"]["replayed"] == 1
    finally:
        torch.use_deterministic_algorithms(mode=False)
    torch.neg(value)
    assert made.counters()["neg.default"]["replayed"] == 2


def test_a_mode_that_changes_during_a_recording_leaves_no_plan(enabled):
    change = "torch.use_deterministic_algorithms(True); target = torch.empty_like(self)"
    body = f"    {change}; launch(self, target, -1.0); return target\n"
    made = enabled(neg=standin.KERNELS["neg"].partition("def neg_kernel_impl")[0] + HELPERS + body)
    try:
        torch.neg(torch.arange(100.0))
        torch.use_deterministic_algorithms(mode=False)
        made.learn()
        for mode in (True, False):
            torch.use_deterministic_algorithms(mode=mode)
            torch.neg(torch.arange(100.0))
            assert made.counters()["neg.default"]["replayed"] == 0
    finally:
        torch.use_deterministic_algorithms(mode=False)


def test_gradients_flow_through_replays(enabled):
    made = enabled("neg")
    for planned in (False, True):
        leaf = torch.arange(100.0, requires_grad=True)
        torch.neg(leaf).sum().backward()
        assert torch.equal(leaf.grad, torch.full((100,), -1.0))
        made.learn()
        assert made.counters()["neg.default"]["served"] == 1 + planned
    assert made.counters()["neg.default"]["replayed"] == 1


def test_disabling_forgets_plans_and_calls_that_were_noted(enabled, gpu):
    value = torch.arange(100.0)
    with enabled("neg") as made:
        torch.neg(value)
        made.learn()
        with torch.no_grad():
            torch.neg(value)
    launches = gpu.library.standin_launches()
    assert torch.equal(torch.neg(value), -value)
    assert gpu.library.standin_launches() == launches
    with enabled("neg") as made, torch.no_grad():
        torch.neg(value)
        assert made.learn()["neg.default"] == {"plans": 1, "refused": {}}
        torch.neg(value)
        assert made.counters()["neg.default"]["replayed"] == 1


def test_a_thread_makes_plans_in_the_background(kernels, gpu):
    with opforge.enabled(kernels({"neg": standin.KERNELS["neg"]}), device="cpu", policy="all") as made:
        torch.neg(torch.arange(100.0))
        assert made.learn()["neg.default"] == {"plans": 1, "refused": {}}  # waits for the thread
        torch.neg(torch.arange(100.0))
        assert made.counters()["neg.default"]["replayed"] == 1


def test_calls_of_one_geometry_are_learned_once(enabled):
    """They begin elsewhere in memory, which a geometry does not say."""
    made, memory = enabled("neg"), torch.arange(200.0)
    expected = [torch.neg(memory[offset : offset + 100]) for offset in (1, 2, 3)]
    assert made.learn()["neg.default"] == {"plans": 1, "refused": {}}
    for offset, result in zip((1, 2, 3), expected, strict=True):
        assert same_bits(torch.neg(memory[offset : offset + 100]), result)
    assert made.counters()["neg.default"] | {"kernel": ""} == {"kernel": "", "served": 6, "aten": {}, "replayed": 3}


def test_of_many_calls_that_repeat_it_is_not_always_the_same_one_that_is_noted(enabled):
    """After the first calls, one in sixteen is noted; a model may make sixteen calls again and again."""
    made = enabled("neg")
    for _ in range(64):
        torch.neg(torch.ones(1))
    for _ in range(30):
        for size in range(2, 18):
            torch.neg(torch.ones(size))
    assert made.learn()["neg.default"]["plans"] >= 6


def test_integers_in_tensors_stay_below_every_size_and_number():
    """They may be positions: one out of range would write anywhere."""
    grad, rows = torch.ones(50, 8), torch.zeros(50, dtype=torch.int64)
    call = learning.CallSpec.of((grad, rows, 5, -1, False), {}).make()
    for seed in range(20):
        call.fill(seed)
        assert 0 <= int(call.args[1].min()) <= int(call.args[1].max()) < 5


def test_bad_options_are_refused(kernels):
    with pytest.raises(opforge.errors.OpforgeError, match="learn='soon' is unknown; allowed: background"):
        opforge.enable(kernels({"neg": standin.KERNELS["neg"]}), device="cpu", learn="soon")


def test_a_forked_child_goes_on_while_a_thread_notes_calls(enabled):
    enabled("neg")
    with learning.LEARNER._changed:  # as if another thread held it
        child = os.fork()
        if not child:
            os._exit(not torch.equal(torch.neg(torch.arange(100.0)), -torch.arange(100.0)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
