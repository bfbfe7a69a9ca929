"""A kernel's process as a judge speaks with it: what it hands back of every form of a case, and how it ends."""

from __future__ import annotations

import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opforge.cases import Case, Phase
from opforge.cases.case import Expect
from opforge.cases.tensors import tensor_from_row
from opforge.cases.values import contiguous_strides
from opforge.cases.variant_shapes import LARGE_VARIANT_NAMES
from opforge.judge import variants
from opforge.judge.batch import Batch, CaseRow
from opforge.judge.kernel_worker import KernelWorker, WorkerConfig
from opforge.ops import table

CONFIG = WorkerConfig("cpu", 60.0, None, arena_bytes=512 << 20, input_bytes=256 << 20)
MATRIX = "((T([3, 4], f32),), {})"


@pytest.fixture
def worker(shared_server) -> Iterator[KernelWorker]:
    """Return a worker without confinement; when the judge hangs up, it ends by itself."""
    worker = KernelWorker(shared_server.spawner, CONFIG)
    yield worker
    worker._channel.close()
    assert select.select([worker._pidfd], [], [], 30)[0]
    assert worker.close() == "exited with status 0"


def loaded(worker: KernelWorker, file: Path, op: str, body: str) -> dict[str, Any]:
    name = op.partition(".")[0]
    file.write_text(f"import torch\ndef {name}_kernel_impl(self):\n    {body}\n")
    kernel = {"file": str(file), "primary": op, "entries": [f"{name}_kernel_impl"], "name": name, "untimed": True}
    return worker.ask({"do": "load", "kernel": {**kernel, "forbidden": [op]}})


def in_all_forms(op: str, text: str = MATRIX) -> Batch:
    """Return a case in all forms in which a judge has it called."""
    batch = Batch(table().get(op), torch.device("cpu"), CONFIG.input_bytes, {}, np.zeros(64 << 20, np.uint8))
    row = CaseRow(Case.make(op, text).id, text, "", Expect.RETURNS, Phase.CORRECTNESS, "")
    assert variants.add_with_variants(batch, table().get(op), row, 0, 1, hostile=True)
    return batch


def called(worker: KernelWorker, op: str, batch: Batch, **more: Any) -> list[dict[str, Any]]:
    batch.copy_to(worker.arena_view)
    cases = [{**entry.request().wire(), **more} for entry in batch.entries]
    return worker.ask({"do": "call", "op": op, "random": False, "cases": cases}, cases=len(cases))["results"]


def handed_back(worker: KernelWorker, row: list[Any]) -> torch.Tensor:
    at, nbytes, dtype, shape, *_ = row
    contents = bytearray(worker.arena_view[at : at + nbytes])
    return tensor_from_row(contents, [0, nbytes, dtype, shape, contiguous_strides(tuple(shape)), 0, None])


def test_it_hands_back_what_a_right_kernel_returns_in_every_form(worker, tmp_path):
    op = "abs.default"
    assert loaded(worker, tmp_path / "right.py", op, "return torch.where(self < 0, -self, self) + 0") == {}
    batch = in_all_forms(op)
    assert len(batch.entries) > 20
    for entry, reply in zip(batch.entries, called(worker, op, batch), strict=True):
        if entry.variant in LARGE_VARIANT_NAMES:  # not called where the machine is slow
            continue
        found = handed_back(worker, reply["returned"]["T"])
        torch.testing.assert_close(found, entry.answer.result, rtol=0, atol=0, equal_nan=True, msg=entry.variant)
        assert not {"state", "bypass", "late", "written_through"} & set(reply), entry.variant
        assert reply["shares_result"] is False


def test_it_tells_what_an_in_place_kernel_wrote(worker, tmp_path):
    op = "abs_.default"
    assert loaded(worker, tmp_path / "in_place.py", op, "return self.copy_(torch.where(self < 0, -self, self))") == {}
    batch = in_all_forms(op)
    reply = called(worker, op, batch)[0]
    assert reply["returned"]["same"] == [0]
    torch.testing.assert_close(handed_back(worker, reply["inputs"][0]), batch.entries[0].answer.inputs[0])


def test_it_tells_which_operators_a_kernel_calls_and_which_it_may_not(worker, tmp_path):
    op = "abs.default"
    assert loaded(worker, tmp_path / "calls.py", op, "return torch.abs(self.neg())") == {}
    replies = called(worker, op, in_all_forms(op), count_calls=True)
    assert replies[0]["calls"] == {"neg": 1, "abs": 1}
    assert replies[0]["bypass"] == ["abs"]


@pytest.mark.parametrize(
    ("body", "key", "value"),
    [
        ("raise ValueError('no')", "raised", ["ValueError", "ValueError: no (line 3)"]),
        ("raise SystemExit(3)", "exited", "3"),
        (
            "torch.set_default_dtype(torch.float64); return -self",
            "state",
            ["default_dtype: torch.float32 became torch.float64"],
        ),
        ("torch.rand(1); return -self", "state", ["the random number generator was advanced"]),
        ("return self.to_sparse()", "returned", {"junk": "a tensor of layout torch.sparse_coo on cpu"}),
        ("return object()", "returned", {"junk": "builtins.object"}),
        (
            "return self.clone().requires_grad_()",
            "unusable",
            "its result, or an input after the call, requires gradients",
        ),
        ("self.t_(); return -self", "reshaped", [0]),
    ],
)
def test_it_tells_what_else_a_kernel_does(worker, tmp_path, body, key, value):
    op = "abs.default"
    assert loaded(worker, tmp_path / "odd.py", op, body) == {}
    assert called(worker, op, in_all_forms(op))[0][key] == value
