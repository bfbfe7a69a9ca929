"""Replays of random calls equal the kernels in Python bit for bit, through a stand-in for the CUDA driver."""

from __future__ import annotations

import pytest
import torch

import opforge
from opforge.runtime import learning
from tests.runtime import standin
from tests.runtime.random_calls import RandomCalls, replayed
from tests.runtime.test_launch_plans import gpu as gpu  # noqa: PLC0414
from tests.runtime.test_launch_plans import libcuda as libcuda  # noqa: PLC0414


@pytest.mark.parametrize(
    ("calls", "pool", "rounds"), [(20_000, 80, 4), pytest.param(1_000_000, 500, 20, marks=pytest.mark.slow)]
)
def test_replays_equal_the_kernels_in_python_bit_for_bit(kernels, gpu, monkeypatch, calls, pool, rounds):
    monkeypatch.setattr(learning, "_ALL_NOTED", pool)
    root = kernels(standin.KERNELS)
    random_calls = RandomCalls(root, list(standin.KERNELS), seed=24, size=pool, device="cpu", dtype=torch.float32)
    with opforge.enabled(root, device="cpu", policy="all", learn="request") as made:
        assert random_calls.learn(made) == [], {k: v["refused"] for k, v in made.learn().items() if v["refused"]}
        before = replayed(made)
        assert random_calls.run(calls, rounds) == ""
        assert replayed(made) == before + calls
        assert not any(row["aten"] for row in made.counters().values())
