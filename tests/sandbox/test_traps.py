"""Traps see a call however it is made; gradients flow through what is installed, and ATen is back afterwards."""

from __future__ import annotations

import contextlib
import threading
import warnings

import pytest
import torch

from opforge.sandbox.guard.traps import Traps
from opforge.sandbox.guest.loader import aten_function, gradients, override_aten


@pytest.fixture(autouse=True)
def _no_strangers(monkeypatch):
    """Take pytest's own frames, and those of this file, for the harness's, and what they call for what it needs."""
    monkeypatch.setattr("opforge.sandbox.guard.traps._KNOWN", "")
    monkeypatch.setattr("opforge.sandbox.guard.traps.HARNESS", {"mm", "hardswish", "sigmoid"})


@pytest.fixture(scope="module")
def traps() -> Traps:
    made = Traps("cpu")
    made.add(["mm.default", "mm.out", "hardswish.default", "sigmoid.default"])
    return made


def _in_a_thread(tensor):
    thread = threading.Thread(target=torch.ops.aten.hardswish, args=(tensor,))
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    ("call", "seen"),
    [
        (torch.nn.functional.hardswish, ["hardswish"]),
        (_in_a_thread, ["hardswish"]),
        (lambda t: torch.nn.functional.linear(t, t), ["mm"]),
        (lambda t: t @ t.T, ["mm"]),
        (lambda t: torch.relu(t) + 1, []),
    ],
)
def test_a_call_is_seen_from_inside_a_kernel_alone(traps, call, seen):
    tensor = torch.randn(3, 3)
    with torch.no_grad():
        torch.nn.functional.hardswish(tensor)
        assert traps.pop_forbidden_calls(floats=True) == []
        traps.wrap_kernel(call)(tensor)
    assert traps.pop_forbidden_calls(floats=True) == seen


def test_a_call_of_what_the_harness_does_not_need_is_the_kernels_though_none_of_its_frames_is_there(traps, monkeypatch):
    monkeypatch.setattr("opforge.sandbox.guard.traps.HARNESS", {"mm"})
    torch.nn.functional.hardswish(torch.randn(3, 3))
    torch.mm(torch.randn(3, 3), torch.randn(3, 3))
    assert traps.pop_forbidden_calls(floats=True) == ["hardswish"]


def test_a_kernels_own_counting_in_integers_is_no_bypass(traps):
    index = torch.arange(4).reshape(2, 2)
    traps.wrap_kernel(lambda: index @ index)()
    assert traps.pop_forbidden_calls(floats=True) == []
    traps.wrap_kernel(lambda: index @ index)()
    assert traps.pop_forbidden_calls(floats=False) == ["mm"]


def test_one_who_registers_over_a_trap_is_seen(traps):
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the first override of a process, and of no other
        library.impl("hardswish", lambda t: t, "CPU")
    assert traps.reregistered() == ["hardswish"]
    library._destroy()
    assert traps.reregistered() == []


def test_gradients_flow_through_what_is_installed():
    def wrong(self):
        return torch.full_like(self, 0.5)

    def given():
        tensor = torch.linspace(-1, 1, 5)
        return gradients(aten_function("tanh.default"), [tensor], {}, [tensor])[0]

    plain = given()
    with override_aten(wrong, "tanh.default", "CPU"):
        assert torch.allclose(given(), torch.arange(5).cos() * 0.75)
    assert torch.equal(given(), plain)


def test_integers_that_are_the_bytes_of_a_float_are_no_counting(traps):
    given = torch.randn(4, 4)

    def over_its_memory(tensor):
        as_integers = tensor.view(torch.int32)
        return (as_integers @ as_integers).float()

    def over_its_results(tensor):
        result = torch.empty_like(tensor)
        torch.mm(torch.ones(4, 4, dtype=torch.int32), torch.ones(4, 4, dtype=torch.int32), out=result.view(torch.int32))
        return result

    for kernel in (over_its_memory, over_its_results):
        traps.wrap_kernel(kernel)(given)
        assert traps.pop_forbidden_calls(floats=True)[0].startswith("mm")


def test_integers_that_depend_on_the_contents_of_a_float_are_no_counting(traps):
    def over_a_copy(tensor):
        as_integers = tensor.view(torch.int32).clone()
        return (as_integers @ as_integers).float()

    kernel = traps.wrap_kernel(over_a_copy)
    kernel(torch.randn(4, 4))
    kernel(torch.randn(4, 4))
    assert traps.pop_forbidden_calls(floats=True) == ["mm"]


def test_the_numbers_of_a_trapped_call_are_others(traps):
    given = torch.linspace(-5, 5, 20)
    right = torch.nn.functional.hardswish(given)
    assert not (traps.wrap_kernel(torch.nn.functional.hardswish)(given) == right).any()
    assert traps.pop_forbidden_calls(floats=True) == ["hardswish"]
    assert torch.equal(torch.nn.functional.hardswish(given), right)


@pytest.mark.parametrize(
    ("call", "seen"),
    [
        (lambda t: torch.sigmoid(t.to_mkldnn()).to_dense(), "sigmoid"),
        (lambda t: torch.mm(t.to_sparse(), t), "mm"),
        (lambda t: torch.sigmoid(torch.quantize_per_tensor(t, 0.1, 0, torch.qint8)).dequantize(), "sigmoid"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_call_in_another_layout_is_seen(traps, call, seen):
    with contextlib.suppress(RuntimeError):
        traps.wrap_kernel(call)(torch.randn(4, 4))
    assert traps.pop_forbidden_calls(floats=True) == [seen]


def test_other_implementations_of_torchs_own_are_seen(traps):
    with pytest.raises(RuntimeError, match="not available"):
        traps.wrap_kernel(lambda t: torch.ops.mkldnn._linear_pointwise(t, t, None, "none", [], ""))(torch.randn(4, 4))
    assert traps.pop_forbidden_calls(floats=True) == ["mkldnn::_linear_pointwise"]
