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

QUICK = [op for op in standin.KERNELS if op != "native_layer_norm"]  # torch imports much to check its results


@pytest.mark.parametrize(
    ("calls", "pool", "rounds", "ops"),
    [(20_000, 80, 4, QUICK), pytest.param(1_000_000, 500, 20, [*standin.KERNELS], marks=pytest.mark.slow)],
)
def test_replays_equal_the_kernels_in_python_bit_for_bit(kernels, gpu, monkeypatch, calls, pool, rounds, ops):
    monkeypatch.setattr(learning, "_ALL_NOTED", pool)
    root = kernels({op: standin.KERNELS[op] for op in ops})
    random_calls = RandomCalls(root, ops, seed=24, size=pool, device="cpu", dtype=torch.float32)
    with opforge.enabled(root, device="cpu", policy="all", learn="request") as made:
        assert random_calls.learn(made) == [], [row["refused"] for row in made.learn().values()]
        before = replayed(made)
        assert random_calls.run(calls, rounds) == ""
        assert replayed(made) == before + calls
        assert not any(row["aten"] for row in made.counters().values())
