"""The global state of torch: each change that a kernel leaves behind is seen, and undone."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import BaseTorchFunctionMode

from opforge.sandbox.guest.global_state import GlobalState

CHANGES = {
    "default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "grad_mode": lambda: torch.set_grad_enabled(not torch.is_grad_enabled()),
    "matmul_precision": lambda: torch.set_float32_matmul_precision("medium"),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "autocast on cuda": lambda: torch.set_autocast_enabled("cuda", True),
    "default_device": lambda: torch.set_default_device("meta"),
    "cudnn": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "modes": lambda: BaseTorchFunctionMode().__enter__(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_and_undone(name):
    before = GlobalState.now()
    try:
        CHANGES[name]()
        after = GlobalState.now()
    finally:
        before.restore()
    assert name.split()[0] in {change.partition(":")[0] for change in after.changes_since(before, rng=True)}
    assert GlobalState.now().changes_since(before, rng=True) == []


def test_random_numbers_that_were_drawn_are_seen_and_put_back():
    before = GlobalState.now()
    torch.rand(1)
    assert GlobalState.now().changes_since(before, rng=True) == ["the random number generator was advanced"]
    assert GlobalState.now().changes_since(before, rng=False) == []
    before.restore()
    assert GlobalState.now().changes_since(before, rng=True) == []
