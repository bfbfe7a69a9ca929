"""Operators that torch itself overrides from Python: what is said of them, and that they keep working."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch

import opforge
from opforge.runtime import enabling
from opforge.runtime.aten_kernels import dispatcher_dump
from opforge.runtime.dispatch import KernelWarning
from opforge.runtime.loading import aten_operators
from opforge.runtime.operator_schema import schema_of
from opforge.runtime.torch_native import overridden_by_torch
from tests.torch_native import needs_torch_native

pytestmark = needs_torch_native
OP = "erfinv"
SOURCE = "def erfinv_kernel_impl(self):\n    if self.numel() > 3:\n        raise NotImplementedError\n    return self + MARK\n"


@pytest.fixture
def router(monkeypatch):
    """Have torch override an operator: calls with five elements return sevens."""
    from torch._native import registry

    monkeypatch.setattr(enabling, "_warnings_given", set())
    for name in ("_graphs", "_op_symbol_to_lib_graph", "_dispatch_key_to_lib_graph", "_dsl_name_to_lib_graph"):
        monkeypatch.setattr(registry, name, {})
    sevens = functools.partial(torch.full_like, fill_value=7)
    registry.register_op_override("triton", "aten", OP, "CPU", lambda x: x.numel() == 5, sevens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the first override in a process
        registry.reenable_op_overrides(enable_op_symbols=OP)
    yield torch.backends.python_native
    opforge.disable()
    registry.deregister_op_overrides(disable_op_symbols=OP)
    registry._filter_state._op_symbols.discard(OP)


def call(count):
    return torch.special.erfinv(torch.zeros(count))[0].item()


@pytest.mark.parametrize("native", ["1", "0"])
def test_it_is_told_once_and_stays_in_place(router, kernels, monkeypatch, native):
    monkeypatch.setenv(enabling.NATIVE_VARIABLE, native)
    root, before = kernels({OP: SOURCE}), dispatcher_dump(schema_of("erfinv.default"))
    with pytest.warns(KernelWarning, match=r"torch overrides erfinv.default from Python .*TORCH_DISABLE_NATIVE_JIT=1"):
        first = opforge.enable(root, device="cpu", policy="all", ops=OP)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = opforge.enable(root, device="cpu", policy="all", ops=OP)
    assert first.overridden_by_torch == second.overridden_by_torch == ["erfinv.default"]
    assert [call(n) for n in (2, 4, 5)] == [1000, 0, 7]
    second.disable()
    first.disable()
    assert [call(n) for n in (2, 4, 5)] == [0, 0, 7]
    assert dispatcher_dump(schema_of("erfinv.default")) == before


def test_where_the_warning_is_an_error_nothing_is_enabled(router, kernels):
    before = dispatcher_dump(schema_of("erfinv.default"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KernelWarning, match=r"torch overrides erfinv\.default"):
            opforge.enable(kernels({OP: SOURCE}), device="cpu", policy="all")
    assert not enabling._enabled
    assert dispatcher_dump(schema_of("erfinv.default")) == before


def test_switched_off_it_is_not_told(router, kernels):
    assert overridden_by_torch("CPU", aten_operators()) == ["erfinv.default"]
    assert "erfinv.default" not in overridden_by_torch("CUDA", aten_operators())
    router.disable_operations(OP)
    assert not overridden_by_torch("CPU", aten_operators())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with opforge.enabled(kernels({OP: SOURCE}), device="cpu", policy="all") as made:
            assert not made.overridden_by_torch
            assert [call(n) for n in (2, 4, 5)] == [1000, 0, 0]
