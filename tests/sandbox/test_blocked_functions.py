"""Functions of ATen's past the dispatcher end a process in which they are closed, and the dispatcher goes on."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch

from opforge.kernels.native.elf import NotALibraryError, symbols
from opforge.sandbox.guard import blocked_functions
from opforge.sandbox.guard.registrations import RegistrationSnapshot

LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
HYPOT = "_ZN2at3cpu9hypot_outERNS_6TensorERKS1_S4_"


def _status_of(action) -> int:
    pid = os.fork()
    if pid == 0:
        action()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _call_past_the_dispatcher() -> None:
    tensors = [torch.ones(3) for _ in range(3)]
    places = [ctypes.byref(ctypes.c_void_p(t._cdata)) for t in tensors]
    ctypes.CDLL(str(LIBRARY))[HYPOT](*places)


def _closed_and(action) -> int:
    def both() -> None:
        blocked_functions.block(["hypot.out"])
        action()

    return _status_of(both)


def test_a_closed_function_ends_the_process_and_others_do_not():
    blocked_functions.function_addresses()
    assert _status_of(_call_past_the_dispatcher) == 0
    assert _closed_and(_call_past_the_dispatcher) == blocked_functions.EXIT_STATUS
    assert _closed_and(lambda: torch.hypot(torch.ones(3), torch.ones(3))) == 0


def test_symbols_are_read_from_the_file(tmp_path):
    assert [s.defined for s in symbols(LIBRARY, HYPOT)] == [True]
    (tmp_path / "no.so").write_bytes(b"\x7fELF\x02\x01 and nothing more")
    with pytest.raises(NotALibraryError):
        list(symbols(tmp_path / "no.so", HYPOT))


def test_what_is_registered_under_aten_is_known():
    before = RegistrationSnapshot()
    assert before.changed() == []
    library = torch.library.Library("aten", "IMPL")
    library.impl("hardshrink", lambda self, lambd=0.5: self, "Negative")
    assert before.changed() == ["aten::hardshrink"]
    assert before.changed(ignored=["hardshrink.default"]) == []
    library._destroy()
    assert before.changed() == []
