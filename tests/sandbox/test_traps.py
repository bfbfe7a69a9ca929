"""Traps see a call however it is made; gradients flow through what is installed, and ATen is back afterwards."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch

from opforge.sandbox.loader import aten_function, gradients, installed
from opforge.sandbox.traps import Traps


@pytest.fixture(scope="module")
def traps() -> Traps:
    made = Traps("cpu")
    made.set(["mm.default", "mm.out", "hardswish.default"])
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
        assert traps.sprung(floats=True) == []
        traps.watched(call)(tensor)
    assert traps.sprung(floats=True) == seen


def test_a_kernels_own_counting_in_integers_is_no_bypass(traps):
    index = torch.arange(4).reshape(2, 2)
    traps.watched(lambda: index @ index)()
    assert traps.sprung(floats=True) == []
    traps.watched(lambda: index @ index)()
    assert traps.sprung(floats=False) == ["mm"]


def test_one_who_registers_over_a_trap_is_seen(traps):
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the first override of a process, and of no other
        library.impl("hardswish", lambda t: t, "CPU")
    assert traps.removed() == ["hardswish"]
    library._destroy()
    assert traps.removed() == []


def test_gradients_flow_through_what_is_installed():
    def wrong(self):
        return torch.full_like(self, 0.5)

    def given():
        tensor = torch.linspace(-1, 1, 5)
        return gradients(aten_function("tanh.default"), [tensor], {}, [tensor])[0]

    plain = given()
    with installed(wrong, "tanh.default", "CPU"):
        assert torch.allclose(given(), torch.arange(5).cos() * 0.75)
    assert torch.equal(given(), plain)
