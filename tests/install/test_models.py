"""A transformer that knows nothing of us, on the example kernels: what it answers, what it learns, and that PyTorch is itself again."""

from __future__ import annotations

import copy
import importlib.util
import shutil

import pytest
import torch

import opforge
from opforge.ops import table
from opforge.runtime.aten_kernels import dispatcher_dump
from tests.conftest import ROOT

STEPS = 20


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("small", ROOT / "examples" / "models" / "small_transformer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def right_kernels(tmp_path):
    """Return the example kernels but for the one that is inaccurate on purpose."""
    return shutil.copytree(
        ROOT / "examples" / "model_kernels",
        tmp_path / "kernels",
        ignore=shutil.ignore_patterns("gelu", "*.proof.json*"),
    )


def answers(example, model, inputs):
    """Return outputs and gradients of a model, in float64, by name."""
    model.zero_grad()
    output = model(*inputs)
    example.loss(output).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {name: t.detach().double().clone() for name, t in (output | gradients).items()}


def losses(example, model, inputs):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = example.loss(model(*inputs))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return torch.tensor(found, dtype=torch.float64)


def test_a_transformer_infers_and_trains_on_kernels_as_on_aten(example, right_kernels):
    before = {op.name: dispatcher_dump(op) for op in table()}
    torch.manual_seed(0)
    model, inputs = example.model(), example.inputs()
    exact = answers(example, copy.deepcopy(model).double(), inputs)
    aten = answers(example, model, inputs)
    curve = losses(example, copy.deepcopy(model), inputs)
    with opforge.enabled(right_kernels, device="cpu", policy="all") as made:
        ours = answers(example, model, inputs)
        our_curve = losses(example, copy.deepcopy(model), inputs)
    served = {op: row["served"] for op, row in made.counters().items() if row["served"]}
    assert {"mm.default", "addmm.default", "bmm.default", "native_layer_norm.default", "tanh.default"} <= set(served)
    assert {"native_layer_norm_backward.default", "_softmax.default", "_log_softmax.default"} <= set(served)
    for name, reference in exact.items():
        size = float(reference.abs().max())
        allowed = 4 * float((aten[name] - reference).abs().max()) + 8 * torch.finfo(torch.float32).eps * size
        assert float((ours[name] - reference).abs().max()) <= allowed, name
    assert curve[-1] < 0.9 * curve[0]
    torch.testing.assert_close(our_curve, curve, rtol=1e-4, atol=0)
    assert {op.name: dispatcher_dump(op) for op in table()} == before
    again = answers(example, model, inputs)
    assert all(torch.equal(again[name], aten[name]) for name in aten)
