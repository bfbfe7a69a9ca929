"""CUDA sources, built with nvcc: compiled anywhere that has it, judged and raced where there is a GPU."""

from __future__ import annotations

import shutil

import pytest

from opforge.kernels import native
from opforge.kernels.native import toolchain
from tests.conftest import ROOT, UNARY, verdicts
from tests.native import write

NEG = (ROOT / "examples" / "cuda_kernels" / "neg" / "neg_implementation_1.cu").read_text()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
@pytest.mark.slow
def test_a_cuda_source_compiles_and_says_why_it_cannot_be_loaded_without_cuda(tmp_path):
    built = native.build(native.LibrarySpec.of_file(write(tmp_path / "neg", NEG, "neg_implementation_1.cu")))
    assert built.abi == "stable"
    if toolchain.torch_build().cuda is None:
        (look,) = native.inspect_libraries([[built.library]])
        assert "aoti_torch_get_current_cuda_stream is not in this one; it needs a torch with CUDA" in look.error


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_an_error_of_nvcc_is_told_with_file_and_line(tmp_path):
    with pytest.raises(native.BuildError) as caught:
        native.build(
            native.LibrarySpec.of_file(write(tmp_path / "bad", "__global__ void f() {\n  missing();\n}\n", "bad.cu"))
        )
    assert caught.value.first_error.startswith('bad.cu:2: error: identifier "missing" is undefined')


@pytest.mark.gpu
def test_a_cuda_kernel_is_judged_and_raced(tmp_path, judge_tiny):
    write(tmp_path / "kernels" / "neg", NEG, "neg_implementation_1.cu")
    ended = judge_tiny(tmp_path / "kernels", {"neg.default": UNARY}, performance=True, device="cuda", timeout_s=60.0)
    assert verdicts(ended) == {"neg.default": {("passed", "")}}
    assert any(row.figures.get("speedup") for row in ended.store.rows())
