"""What the harness in a kernel's process calls itself: only what is listed, so that all else is known to be the kernel's."""

from __future__ import annotations

import textwrap

import numpy as np
import pytest
import torch

from opforge.cases import Case, Phase
from opforge.cases.case import Expect
from opforge.judge import variants
from opforge.judge.batch import Batch, CaseRow
from opforge.judge.kernel_worker import KernelWorker, WorkerConfig
from opforge.ops import table
from opforge.sandbox.guard.registrations import HARNESS

HEAD = "import numpy as np\nimport torch\nt = lambda x: torch.from_numpy(np.array(x))\n"
KERNELS = {
    "exp.default": ("((T([3, 4], f32),), {})", "def exp_kernel_impl(self):\n    return t(np.exp(self.numpy()))"),
    "abs_.default": (
        "((T([3, 4], f64),), {})",
        "def abs__kernel_impl(self):\n    self.numpy()[...] = np.abs(self.numpy())\n    return self",
    ),
    "bitwise_and.Tensor": (
        "((T([3, 4], i64), T([3, 4], i64)), {})",
        "def bitwise_and_kernel_impl(self, other):\n    return t(self.numpy() & other.numpy())",
    ),
}
"""Kernels that compute with NumPy alone."""


@pytest.mark.parametrize("op", KERNELS)
def test_the_harness_calls_what_is_listed_and_nothing_else(shared_server, tmp_path, op):
    text, source = KERNELS[op]
    name = op.partition(".")[0]
    file = tmp_path / f"{name}_implementation_1.py"
    file.write_text(HEAD + textwrap.dedent(source))
    config = WorkerConfig("cpu", 60.0, None, arena_bytes=512 << 20, input_bytes=256 << 20)
    batch = Batch(table().get(op), torch.device("cpu"), config.input_bytes, {}, np.zeros(64 << 20, np.uint8))
    row = CaseRow(Case.make(op, text).id, text, "", Expect.RETURNS, Phase.CORRECTNESS, "")
    assert variants.add_with_variants(batch, table().get(op), row, 0, 1, hostile=True)
    others = [o.name for o in table() if o.base not in HARNESS and not o.composite]
    kernel = {"file": str(file), "primary": op, "entries": [f"{name}_kernel_impl"], "name": name, "forbidden": others}
    worker = KernelWorker(shared_server.spawner, config)
    try:
        assert "error" not in worker.ask({"do": "load", "kernel": kernel}, timeout_s=60)
        batch.copy_to(worker.arena_view)
        cases = [entry.request().wire() for entry in batch.entries]
        assert len(cases) > 20
        request = {"do": "call", "op": op, "random": False, "cases": cases}
        called = worker.ask(request, cases=len(cases))["results"]
        worker.ask({"do": "gradient", "op": op, "case": batch.entries[0].request().wire()})
        called += worker.ask({**request, "cases": cases[:1]})["results"]
    finally:
        worker.close()
    assert any("returned" in reply for reply in called)
    assert [reply["bypass"] for reply in called if "bypass" in reply] == []
