"""A run says which operators torch itself overrides from Python where kernels are judged."""

from __future__ import annotations

import pytest

from opforge.reports.run_files import summary_markdown
from tests.conftest import verdicts
from tests.torch_native import needs_torch_native, overriding_relu

RELU = "import torch\ndef relu_kernel_impl(self):\n    return torch.where(self <= 0, 0, self)\n"


@needs_torch_native
@pytest.mark.own_server
@pytest.mark.slow
def test_torchs_own_overrides_are_recorded(judge_tiny, kernel_directory, tmp_path, monkeypatch):
    for name, value in overriding_relu(tmp_path, "False").items():
        monkeypatch.setenv(name, value)
    ended = judge_tiny(
        kernel_directory({"relu": RELU}), {"relu.default": ["((T([5, 7], f32),), {})"]}, performance=True
    )
    assert verdicts(ended) == {"relu.default": {("passed", "")}}
    manifest = ended.store.manifest()
    assert manifest.machine.overridden_by_torch == ("relu.default",)
    page = summary_markdown(manifest, ended.summary)
    assert "| overridden by torch from Python (torch._native) | relu.default |" in page
