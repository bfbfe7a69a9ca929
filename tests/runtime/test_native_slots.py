"""Calls through slots in C++: passed on, decided once, counted; and the dispatcher after them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch

import opforge
from opforge.runtime import enabling, native_slots
from opforge.runtime.dispatch import INSTALL_LOCK
from opforge.runtime.native.binding import Slot, load
from opforge.runtime.native.building import NAMESPACE
from opforge.runtime.native_slots import NativeSlot
from opforge.runtime.operator_schema import schema_of
from opforge.runtime.proven_calls import ProvenCalls
from tests.install.proving import ADD, RELU, described, marked, outcome, prove

ROW = {"rank": [1, 2], "numel": [1, 16], "layouts": ["contiguous", "offset"], "timed": [[1, 16, True]]}
SIZES = ("size not proven", "dtypes not proven")


def dumps(op):
    name = f"aten::{op.removesuffix('.default')}"
    return torch._C._dispatch_dump(name), torch._C._dispatch_dump_table(name)


@pytest.fixture
def asked(monkeypatch):
    """Return a list that grows with every question to Python."""
    questions = []
    ask = ProvenCalls.why_not
    monkeypatch.setattr(ProvenCalls, "why_not", lambda *given: questions.append(given) or ask(*given))
    return questions


@pytest.fixture
def proven(kernels):
    root = kernels({"relu": RELU, "add": ADD})
    prove(root, "relu", {"relu.default": {"float32": ROW}})
    prove(
        root,
        "add",
        {"add.Tensor": {"float32,float32": {**ROW, "arguments": {"alpha": {"default": [], "int": [2, 3]}}}}},
    )
    return root


X = torch.arange(24.0).reshape(4, 6) - 9
INT = torch.arange(24).reshape(4, 6) - 9
BOOL = X > 0
COMPLEX = torch.complex(X, X.flip(0))
INDEX = torch.tensor([0, 2, 1])
CALLS = {
    "add.Tensor": [(X, X), (X, 2), (X, 2.5), (X, INT), (X, True), (INT, 1.5), (COMPLEX.conj(), X), (X.t(), X.t()), (X, 1j)],
    "add_.Tensor": [(X.clone(), X), (X.clone(), 3)],
    "add.out": [(X, X, {"out": torch.empty(0)}), (X, X, {"out": torch.empty(4, 6)})],
    "mul.Tensor": [(X, -0.0), (BOOL, BOOL), (X.bfloat16(), 3)],
    "mul.Scalar": [(X, 2), (X, 2.5)],
    "div.Tensor_mode": [(X, 3, {"rounding_mode": "floor"}), (X, 3, {"rounding_mode": None})],
    "relu.default": [(X,), (X[:, ::2],), (X.expand(2, 4, 6),), (torch.empty(0, 3),), (X.half(),)],
    "neg.default": [(X,), (COMPLEX.imag,), (BOOL,)],
    "sum.dim_IntList": [(X, [0]), (X, [0, 1], True), (INT, [-1], {"dtype": torch.float64})],
    "mean.default": [(X,), (INT,)],
    "_softmax.default": [(X, 1, False), (X, 0, False)],
    "native_layer_norm.default": [(X, [6], None, None, 1e-5), (X, [6], torch.ones(6), torch.ones(6), 1e-5)],
    "native_dropout.default": [(X, 0.0, True)],
    "mm.default": [(X, X.t()), (X, X)],
    "addmm.default": [(torch.ones(4), X, X.t(), {"beta": 0.5, "alpha": 2})],
    "bmm.default": [(X[None], X.t()[None])],
    "convolution.default": [(X[None, None], torch.ones(1, 1, 2, 2), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)],
    "cat.default": [([X, X],), ([X, INT], 1), ([],)],
    "where.self": [(BOOL, X, X + 1), (BOOL, X, torch.tensor(3.0))],
    "index.Tensor": [(X, [INDEX]), (X, [None, INDEX])],
    "index_put_.default": [(X.clone(), [INDEX], torch.ones(3, 6)), (X.clone(), [None, INDEX], torch.tensor(1.0), True)],
    "gather.default": [(X, 0, INDEX[None])],
    "topk.default": [(X, 2), (X, 1, 0, False)],
    "sort.stable": [(X, {"stable": True, "dim": 0})],
    "max.dim": [(X, 0), (X, 1, True)],
    "argmax.default": [(X,), (X, 1)],
    "cumsum.default": [(X, 0), (X, 1, {"dtype": torch.float64})],
    "fill_.Scalar": [(X.clone(), 2)],
    "copy_.default": [(X.clone(), INT)],
    "clamp.default": [(X, 0), (X, None, 3.5), (X, -1, 1)],
    "pow.Tensor_Scalar": [(X, 2), (X, 0.5)],
    "gelu.default": [(X,), (X, {"approximate": "tanh"})],
    "threshold_backward.default": [(X, X, 0)],
    "embedding.default": [(X, INDEX)],
    "upsample_nearest2d.default": [(X[None, None], [8, 12])],
    "view.default": [(X, [24]), (X, [5])],
    "as_strided.default": [(X, [2, 2], [1, 2]), (X, [2], [1], 3)],
    "_to_copy.default": [(X, {"dtype": torch.float64}), (X, {"memory_format": torch.contiguous_format})],
    "empty_like.default": [(X[:0],)],
    "equal.default": [(X, X), (X, X + 1)],
    "_local_scalar_dense.default": [(X[0, 0],)],
    "nonzero.default": [(X,)],
    "_foreach_add.Scalar": [([X, X + 1], 2)],
    "_foreach_add_.List": [([X.clone(), X + 1], [X, X])],
    "unbind.int": [(X,), (X, 1)],
    "split.Tensor": [(X, 2)],
    "var_mean.correction": [(X, [1], {"correction": 0})],
    "linalg_vector_norm.default": [(X, 2, [1])],
    "bitwise_and.Tensor": [(INT, INT), (BOOL, BOOL)],
}  # fmt: skip


def call(op, given):
    base, _, overload = op.partition(".")
    kwargs = given[-1] if isinstance(given[-1], dict) else {}
    args = given[: len(given) - bool(kwargs)]
    return outcome(lambda: getattr(getattr(torch.ops.aten, base), overload)(*args, **kwargs))


@pytest.mark.parametrize("answered_by", ["nobody", "C++", "Python"])
def test_what_is_passed_on_is_what_aten_answers(answered_by, monkeypatch):
    expected = {op: [call(op, given) for given in many] for op, many in CALLS.items()}
    before = {op: dumps(op) for op in CALLS}
    slots = [NativeSlot(schema_of(op), "CPU", load()) for op in CALLS]
    try:
        if answered_by != "nobody":
            for slot in slots:
                slot.kernels = (_nothing_is_for_it(slot.op),)
        if answered_by == "Python":
            monkeypatch.setattr(NativeSlot, "decide", lambda *_given: native_slots._ANSWER_IN_PYTHON)
        for _ in range(2):
            assert {op: [call(op, given) for given in many] for op, many in CALLS.items() if "_." not in op} == {
                op: values for op, values in expected.items() if "_." not in op
            }
    finally:
        for slot in slots:
            slot.kernels = ()
            slot.restore()
    assert {op: dumps(op) for op in CALLS} == before


def _nothing_is_for_it(schema):
    from opforge.runtime.dispatch import InstalledKernel

    return InstalledKernel(schema, "none", lambda *_: 1 / 0, ProvenCalls(schema, {}, check_speed=True), unadapted=True)


def test_python_is_asked_once_for_each_geometry(proven, asked, slot_of):
    with opforge.enabled(proven, device="cpu") as made:
        for _ in range(5):
            for size in (4, 16, 17, 64):
                torch.relu(torch.ones(size))
        assert slot_of("relu.default").collect_counts() is None
        counts = made.counters()["relu.default"]
    assert (counts["served"], counts["aten"]) == (10, {"size not proven": 10})
    assert len(asked) == 4


@pytest.mark.parametrize("others", [(X.reshape(24), X.reshape(24)), (INT, INT), (X.t(), X.t())])
def test_two_geometries_of_a_size_are_found_without_a_search(proven, slot_of, others):
    """A model has calls of one size that differ in shapes or dtypes, and makes them in turns."""
    with opforge.enabled(proven, device="cpu", ops=["add"]) as made:
        expected = [torch.ops.aten.sub(X, -X), torch.ops.aten.sub(others[0], -others[1])]
        native = slot_of("add.Tensor")._native
        for given in ((X, X), others):
            torch.add(*given)
        searches = native.searches
        for _ in range(10):
            for given, result in zip(((X, X), others), expected, strict=True):
                assert described(torch.add(*given)) == described(result)
        assert native.searches == searches
        for size in range(100, 600):  # more than are found so
            torch.add(torch.ones(size), 1)
        searches = native.searches
        torch.add(X, X)
        torch.add(X, X)
        assert native.searches == searches + 1
        assert sum(made.counters()["add.Tensor"]["aten"].values()) == 2 + 20 + 500 + 2


@pytest.mark.parametrize("op", ["add.Tensor", "mul.Tensor", "mul.Scalar", "mm.default", "_softmax.default"])
def test_operators_that_models_call_most_take_arguments_without_boxing(op):
    slot = NativeSlot(schema_of(op), "CPU", load())
    try:
        (line,) = [line for line in dumps(op)[0].splitlines() if line.startswith("CPU: opforge")]
        assert line.endswith("[ boxed unboxed ]")
    finally:
        slot.restore()


BASE = torch.ones(64)
CHANGES = {
    "dtype": lambda: (torch.ones(4, 4, dtype=torch.float64), torch.ones(4, 4)),
    "size": lambda: (torch.ones(4, 3), torch.ones(4, 3)),
    "number of dimensions": lambda: (torch.ones(1, 4, 4), torch.ones(4, 4)),
    "strides": lambda: (torch.ones(4, 4).t(), torch.ones(4, 4)),
    "offset": lambda: (BASE[16:32].view(4, 4), torch.ones(4, 4)),
    "alignment": lambda: (BASE[1:17].view(4, 4), torch.ones(4, 4)),
    "the other tensor's strides": lambda: (torch.ones(4, 4), torch.ones(4, 8)[:, ::2]),
    "shared memory": lambda: (BASE[:16].view(4, 4), BASE[:16].view(4, 4)),
    "shared memory further on": lambda: (BASE[:16].view(4, 4), BASE[4:20].view(4, 4)),
    "gradients": lambda: (torch.ones(4, 4, requires_grad=True), torch.ones(4, 4)),
    "a number": lambda: (torch.ones(4, 4), 1.0),
    "an integer": lambda: (torch.ones(4, 4), 1),
    "a tensor without dimensions": lambda: (torch.ones(4, 4), torch.tensor(1.0)),
    "complex": lambda: (torch.ones(4, 4, dtype=torch.complex64), torch.ones(4, 4)),
    "an argument": lambda: (torch.ones(4, 4), torch.ones(4, 4), {"alpha": 2}),
    "an argument's value": lambda: (torch.ones(4, 4), torch.ones(4, 4), {"alpha": 4}),
    "an argument's type": lambda: (torch.ones(4, 4), torch.ones(4, 4), {"alpha": 2.0}),
    "an argument that is a flag": lambda: (torch.ones(4, 4), torch.ones(4, 4), {"alpha": True}),
    "the sign of zero": lambda: (torch.ones(4, 4), torch.ones(4, 4), {"alpha": -0.0}),
    "infinity": lambda: (torch.ones(4, 4), torch.ones(4, 4), {"alpha": float("inf")}),
}  # fmt: skip


def test_a_change_of_any_one_part_of_a_geometry_is_asked_about(proven, asked):
    """Each call is unlike all others in one part at least, so each is asked about once."""
    with opforge.enabled(proven, device="cpu"):
        add(torch.ones(4, 4), torch.ones(4, 4))
        for number, (what, make) in enumerate(CHANGES.items(), start=2):
            for _ in range(2):
                outcome(lambda make=make: add(*make()))
                assert len(asked) == number, what


def test_lazy_conjugates_are_another_geometry(monkeypatch):
    """Torch resolves them before most operators, but not before mm."""
    asked = []
    decide = NativeSlot.decide
    monkeypatch.setattr(NativeSlot, "decide", lambda *given: asked.append(given) or decide(*given))
    slot = NativeSlot(schema_of("mm.default"), "CPU", load())
    try:
        slot.kernels = (_nothing_is_for_it(slot.op),)
        one = torch.complex(torch.ones(3, 3), torch.ones(3, 3))
        for number, given in enumerate(
            [(one, one.clone()), (one.conj(), one.clone()), (one, one.clone().conj())], start=1
        ):
            torch.mm(*given)
            torch.mm(*given)
            assert len(asked) == number
    finally:
        slot.kernels = ()
        slot.restore()


def test_tensors_that_words_cannot_describe():
    describe = load().describe
    assert describe([torch.ones(2).to_sparse()]) == describe([torch.ones(2, device="meta")]) == []
    assert describe([torch.ones(2, 2), torch.ones(2)]) != describe([torch.ones(2), torch.ones(2, 2)])
    assert describe([]) != describe([torch.ones(())])


def add(one, other, named=None):
    return torch.ops.aten.add.Tensor(one, other, **(named or {}))


def test_only_what_python_has_decided_is_served(proven, asked):
    """With thousands of random calls, the kernel answers exactly those for which Python's check says so."""
    generator = torch.Generator().manual_seed(0)

    def pick(values):
        return values[int(torch.randint(len(values), (), generator=generator))]

    def tensor(size):
        memory = torch.ones(200, dtype=pick([torch.float32] * 4 + [torch.float64, torch.int64]))
        at = pick([0, 0, 0, 1, 4, 8])
        return pick([
            lambda: memory[at : at + size], lambda: memory[at : at + 4 * size].view(4, size), lambda: 2.0, lambda: 3,
            lambda: memory[at : at + 4 * size].view(size, 4).t(), lambda: memory[at : at + 2 * size : 2],
            lambda: memory[at : at + 1].expand(size), lambda: memory[at : at + 64].view(2, 4, 8)[..., :size],
        ])()  # fmt: skip

    with opforge.enabled(proven, device="cpu") as made:
        proven_calls = enabling._slots["add.Tensor", "CPU"].kernels[0]._proven_calls
        served = 0
        for _ in range(6000):
            size = pick([1, 2, 4, 5, 16])
            one, other = tensor(size), tensor(size)
            if not isinstance(one, torch.Tensor) or (
                isinstance(other, torch.Tensor) and other.dim() and one.shape != other.shape
            ):
                continue
            alpha = pick([{}, {}, {"alpha": 1}, {"alpha": 2}, {"alpha": 3}, {"alpha": 4}, {"alpha": 2.0}])
            if "alpha" in alpha and isinstance(alpha["alpha"], float) and not one.is_floating_point():
                continue
            inside = not ProvenCalls.why_not(proven_calls, (one, other), alpha)
            result = outcome(lambda one=one, other=other, alpha=alpha: torch.ops.aten.add.Tensor(one, other, **alpha))
            if not isinstance(result[0], torch.dtype):
                assert not inside
                continue
            assert ("100" in result[-1]) is inside, (described(one), described(other), alpha)
            served += inside
        assert made.counters()["add.Tensor"]["served"] == served > 100


def test_restored_exactly_and_silently(proven):
    before = {op: dumps(op) for op in ("relu.default", "add.Tensor")}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            with opforge.enabled(proven, device="cpu"):
                assert dumps("relu.default") != before["relu.default"]
                assert marked(torch.relu(torch.ones(4)))
            assert {op: dumps(op) for op in before} == before
    assert not said
    assert not marked(torch.relu(torch.ones(4)))


def test_counts_are_exact_with_threads_while_kernels_come_and_go(proven):
    small, large, ready = torch.ones(4), torch.ones(64), threading.Barrier(9)
    calls, wrong = 400, []

    def work():
        ready.wait()
        for _ in range(calls):
            if marked(torch.relu(large)):
                wrong.append("a call that is not proven")
            torch.relu(small)

    threads = [threading.Thread(target=work) for _ in range(8)]
    always = opforge.enable(proven, device="cpu", ops=["relu"])
    try:
        for thread in threads:
            thread.start()
        ready.wait()
        while any(thread.is_alive() for thread in threads):
            with opforge.enabled(proven, device="cpu", ops=["relu"]) as other:
                torch.add(small, small)
            assert sum(other.counters()["relu.default"]["aten"].values()) >= 0
        for thread in threads:
            thread.join()
        counts = always.counters()["relu.default"]
    finally:
        always.disable()
    assert not wrong
    assert counts["aten"] == {"size not proven": 8 * calls}
    assert counts["served"] <= 8 * calls


def test_counts_of_all_kernels_together_are_exact_with_threads(proven):
    small, large, calls = torch.ones(4), torch.ones(64), 400
    others = []

    def work():
        for _ in range(calls):
            torch.relu(large)
            torch.relu(small)

    always = opforge.enable(proven, device="cpu", ops=["relu"])
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        with opforge.enabled(proven, device="cpu", ops=["relu"]) as other:
            others.append(other)
    for thread in threads:  # a call counts when its kernel has answered, even after the kernel was taken out
        thread.join()
    counts = [each.counters()["relu.default"] for each in (always, *others)]
    assert sum(each["served"] for each in counts) == 8 * calls
    passed = [each["aten"].get("size not proven", 0) for each in counts]
    assert passed[0] == 8 * calls >= sum(passed[1:])


def test_threads_call_operators_while_slots_are_put_in_and_taken_out(proven):
    small, wrong, stop = torch.ones(4), [], threading.Event()

    def work():
        while not stop.is_set():
            if float(torch.relu(small).sum()) not in (4.0, 4004.0):
                wrong.append("a wrong answer")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(25):
        opforge.enable(proven, device="cpu", ops=["relu"]).disable()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_autograd_inference_mode_vmap_and_autocast(proven):
    with opforge.enabled(proven, device="cpu") as made:
        x = torch.ones(4, 4, requires_grad=True)
        y = torch.relu(x)
        assert marked(y)
        assert y.grad_fn is not None
        y.sum().backward()
        assert torch.equal(x.grad, torch.ones(4, 4))
        large = torch.ones(5, 5, requires_grad=True)
        torch.relu(large).sum().backward()
        assert torch.equal(large.grad, torch.ones(5, 5))
        with torch.inference_mode():
            assert torch.relu(torch.ones(4, 4)).is_inference()
            assert torch.relu(torch.ones(5, 5)).is_inference()
        assert marked(torch.vmap(torch.relu)(torch.ones(4, 4)))
        assert torch.equal(torch.func.grad(lambda v: torch.relu(v).sum())(torch.ones(4)), torch.ones(4))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert marked(torch.relu(torch.ones(4, 4)))
        compiled = torch.compile(torch.relu, backend="aot_eager", fullgraph=True)
        with pytest.warns(enabling.KernelWarning, match=r"torch\.compile"):
            assert marked(compiled(torch.ones(4, 4)))
        assert made.counters()["relu.default"]["served"] >= 6


def test_a_forked_child_goes_on_and_its_counts_are_its_own(proven):
    stop = threading.Event()
    busy = threading.Thread(target=lambda: [torch.relu(torch.ones(4)) for _ in iter(lambda: not stop.is_set(), False)])
    with opforge.enabled(proven, device="cpu", ops=["relu"]) as made:
        busy.start()

        def right():
            served = [marked(torch.relu(torch.ones(size))) for size in (4, 5, 6, 64)]
            made.disable()
            return [*served, marked(torch.relu(torch.ones(4)))] == [True, True, True, False, False]

        for _ in range(10):
            assert holds_in_fork(right)
        stop.set()
        busy.join()


def test_a_child_forked_while_kernels_are_changed_decides_as_before(proven, slot_of, monkeypatch):
    """A thread has replaced the outcomes in C++, and not yet their numbers in Python."""
    replace, replaced = Slot.set_rules, threading.Event()

    def replace_slowly(*given):
        counts = replace(*given)
        replaced.set()
        time.sleep(0.5)
        return counts

    def right():
        return marked(torch.relu(torch.ones(4, requires_grad=True))) and not marked(torch.relu(torch.ones(64)))

    with opforge.enabled(proven, device="cpu", ops=["relu"]):
        torch.relu(torch.ones(64))
        slot = slot_of("relu.default")
        with monkeypatch.context() as patch:
            patch.setattr(Slot, "set_rules", replace_slowly)
            change = threading.Thread(target=lambda: setattr(slot, "kernels", slot.kernels))
            change.start()
            replaced.wait()
            assert holds_in_fork(right)
            change.join()


def test_a_call_whose_outcome_is_forgotten_meanwhile_is_counted_once(proven, slot_of):
    """A thread may wait for Python's lock while kernels are changed many times."""
    with opforge.enabled(proven, device="cpu", ops=["relu"]) as made:
        torch.relu(torch.ones(4))
        slot_of("relu.default")._python.outcomes.clear()
        assert marked(torch.relu(torch.ones(4)))
        assert made.counters()["relu.default"]["served"] == 2


def test_operators_may_be_called_while_an_outcome_is_added(proven, monkeypatch):
    """Finalisers and signal handlers call them at any time, in the thread that adds the outcome."""
    add = Slot.add_outcome
    results = []

    def add_after_a_call(slot, *given):
        monkeypatch.setattr(Slot, "add_outcome", add)
        results.append(marked(torch.relu(torch.ones(3))))
        return add(slot, *given)

    with opforge.enabled(proven, device="cpu", ops=["relu"]) as made:
        monkeypatch.setattr(Slot, "add_outcome", add_after_a_call)
        thread = threading.Thread(target=lambda: results.append(marked(torch.relu(torch.ones(4)))), daemon=True)
        thread.start()
        thread.join(60)
        assert results == [True, True]
        assert marked(torch.relu(torch.ones(4)))
        assert made.counters()["relu.default"]["served"] == 3


def test_counters_do_not_wait_for_an_installation(proven):
    """Installing may compile kernels, which takes minutes."""
    with opforge.enabled(proven, device="cpu", ops=["relu"]) as made:
        torch.relu(torch.ones(4))
        rows = []
        with INSTALL_LOCK:
            thread = threading.Thread(target=lambda: rows.append(made.counters()["relu.default"]["served"]))
            thread.start()
            thread.join(20)
            assert rows == [1]


def test_slots_of_a_process_are_of_one_kind(proven, monkeypatch):
    """Each kind marks threads inside kernels its own way, so kernels would run on each other."""
    with opforge.enabled(proven, device="cpu", ops=["relu"]):
        monkeypatch.setenv(enabling.NATIVE_VARIABLE, "0")
        with opforge.enabled(proven, device="cpu", ops=["add"]):
            assert {type(slot) for slot in enabling._slots.values()} == {NativeSlot}


def test_a_slot_that_was_removed_leaves_the_next_one_alone():
    """A call that began before may find afterwards that its kernel failed, and remove it from the old slot."""
    old = NativeSlot(schema_of("relu.default"), "CPU", load())
    old.restore()
    new = NativeSlot(schema_of("relu.default"), "CPU", load())
    try:
        new.kernels = (_nothing_is_for_it(new.op),)
        old.kernels = ()
        torch.relu(torch.ones(4))
        new.collect_counts()
        assert new.kernels[0].counts.aten == {"dtypes not proven": 1}
    finally:
        new.kernels = ()
        new.restore()


AT_EXIT = """
import atexit, sys

def call():
    sizes = (4, 5, 64, 65)
    print([torch.relu(torch.ones(size)).max().item() for size in sizes], made.counters()["relu.default"]["served"])

atexit.register(call)  # before torch has registered what it does at exit, so it is called after that
import torch, opforge
made = opforge.enable(sys.argv[1], device="cpu", ops=["relu"])
assert torch.relu(torch.ones(4)).max().item() == 1001
torch.relu(torch.ones(64))
"""


def test_operators_work_until_the_end_of_the_process(proven):
    command = [sys.executable, "-c", AT_EXIT, str(proven)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[1.0, 1.0, 1.0, 1.0] 1\n", "")


def test_memory_does_not_grow_with_kernels_that_come_and_go():
    """A slot of one operator, with an outcome that is used, in a process whose memory is in many pieces."""
    slot = NativeSlot(schema_of("relu.default"), "CPU", load())
    kernel = _nothing_is_for_it(slot.op)

    def cycle(times):
        for _ in range(times):
            slot.kernels = (kernel,)
            torch.relu(torch.ones(4))
            slot.kernels = ()
            slot.restore()
            slot._native.install(slot._python.name)

    try:
        cycle(300)
        before = resident_bytes()
        cycle(600)
        assert (resident_bytes() - before) / 600 < 2048
    finally:
        slot.kernels = ()
        slot.restore()


def resident_bytes():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def holds_in_fork(check):
    """Return whether a forked child finds that a check holds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        signal.alarm(100)  # ends a child that hangs
        try:
            os._exit(0 if check() else 1)
        finally:
            os._exit(2)
    return os.waitpid(pid, 0)[1] == 0


def test_with_more_geometries_than_there_is_room_for_answers_are_the_same(proven, slot_of):
    with opforge.enabled(proven, device="cpu", ops=["relu"]) as made:
        slot = slot_of("relu.default")
        for _ in range(2):
            for size in range(1, 1300):
                assert marked(torch.relu(torch.ones(size))) is (size <= 16)
                assert slot._native.geometries <= 1024
        assert made.counters()["relu.default"] == {
            "kernel": "relu_implementation_1", "served": 32, "aten": {"size not proven": 2 * 1283}
        }  # fmt: skip


def test_inside_a_kernel_every_operator_is_atens_own(kernels):
    uses = "import torch\ndef add_kernel_impl(self, other, *, alpha=1):\n    return torch.relu(self) + MARK\n"
    root = kernels({"relu": RELU, "add": uses}, mark=5000)
    prove(root, "relu", {"relu.default": {"float32": ROW}})
    prove(root, "add", {"add.Tensor": {"float32,float32": ROW}})
    with opforge.enabled(root, device="cpu") as made:
        for _ in range(3):
            assert float(torch.add(torch.ones(4), torch.ones(4))[0]) == 5001
        assert made.counters()["relu.default"]["served"] == 0
        assert marked(torch.relu(torch.ones(4)))


def test_a_kernel_that_fails_is_removed_and_one_that_declines_is_counted(kernels):
    fails = (
        "import torch\ndef relu_kernel_impl(self):\n"
        "    if self.numel() == 3: raise NotImplementedError('three')\n"
        "    if self.numel() == 5: raise ValueError('five')\n    return torch.clamp(self, min=0) + MARK\n"
    )
    root = kernels({"relu": fails})
    prove(root, "relu", {"relu.default": {"float32": ROW}})
    with opforge.enabled(root, device="cpu") as made:
        for _ in range(3):
            assert not marked(torch.relu(torch.ones(3)))
            assert marked(torch.relu(torch.ones(4)))
        with pytest.warns(enabling.KernelWarning, match="five"):
            assert not marked(torch.relu(torch.ones(5)))
        for _ in range(2):
            assert not marked(torch.relu(torch.ones(4)))
        row = made.counters()["relu.default"]
    assert row["served"] == 3
    assert row["aten"] == {"declined: NotImplementedError: three": 3, "raised ValueError: five": 1}


def test_other_code_with_an_operator_of_the_slots_is_refused(kernels):
    """A kernel's library could define the operator by which C++ asks Python, to give the answers itself."""
    root = kernels({"erfinv": "import torch\ndef erfinv_kernel_impl(self):\n    return self + MARK\n"})
    prove(root, "erfinv", {"erfinv.default": {"float32": ROW}})
    theirs = torch.library.Library(NAMESPACE, "FRAGMENT")
    name = f"decide_erfinv_default_CPU_{len(native_slots._python_parts)}"
    theirs.define(f"{name}(Tensor self) -> int")
    theirs.impl(name, lambda self: 1 << 8, "CPU")
    before = dumps("erfinv.default")
    with pytest.warns(enabling.KernelWarning, match="no kernel is enabled"):
        made = opforge.enable(root, device="cpu")
    assert f"{NAMESPACE}::{name} cannot be defined" in made.refused["erfinv.default"]
    assert not marked(torch.erfinv(torch.zeros(4)))
    assert dumps("erfinv.default") == before
    theirs._destroy()
