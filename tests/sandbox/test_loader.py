"""What a worker loads is what its verdicts are of."""

from __future__ import annotations

import pytest
import torch

from opforge.kernels.source import digest
from opforge.runtime.loading import kernel_operator, operator_names
from opforge.sandbox.guest.loader import KernelLoadError, LoadedKernel


def test_a_source_that_changed_since_the_run_began_is_not_judged(tmp_path):
    file = tmp_path / "relu_implementation_1.py"
    (tmp_path / "helper.py").write_text("LEAST = 0\n")
    file.write_text("from helper import LEAST\ndef relu_kernel_impl(self):\n    return self.clamp(min=LEAST)\n")
    description = {
        "name": "relu_implementation_1",
        "primary": "relu.default",
        "file": str(file),
        "entries": ["relu_kernel_impl"],
        "digest": digest(file),
    }
    LoadedKernel(description)
    (tmp_path / "helper.py").write_text("LEAST = 1\n")
    with pytest.raises(KernelLoadError, match=r"relu_implementation_1\.py, or a file that it uses, has changed"):
        LoadedKernel(description)
    LoadedKernel({**description, "digest": digest(file)})


def test_the_operator_of_a_library_is_found_by_name_or_is_the_only_one():
    packets = ["aten::relu", "aten::add"]
    assert kernel_operator(packets, operator_names(["relu_kernel_impl"])) is torch.ops.aten.relu
    assert kernel_operator(packets, ["none", "add"]) is torch.ops.aten.add
    assert kernel_operator(["aten::is_same_size"], ["none"]) is torch.ops.aten.is_same_size.default
    assert kernel_operator(packets, ["none"]) is None
    assert kernel_operator([], ["none"]) is None
