"""Slots in C++, and kernels that leave a mark."""

from __future__ import annotations

import pytest

import opforge
from opforge.runtime import enabling
from opforge.runtime.native_slots import NativeSlot
from tests.install.conftest import kernels as kernels  # noqa: PLC0414


@pytest.fixture(autouse=True)
def native(monkeypatch):
    """Have slots made in C++, and leave nothing enabled."""
    monkeypatch.setenv(enabling.NATIVE_VARIABLE, "1")
    yield
    opforge.disable()


@pytest.fixture
def slot_of():
    """Return a function that gives the slot of an operator."""

    def find(op) -> NativeSlot:
        slot = enabling._slots[op, "CPU"]
        assert isinstance(slot, NativeSlot)
        return slot

    return find
