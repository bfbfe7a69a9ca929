"""Triton kernels judged and timed as they are served: replayed from launch plans."""

from __future__ import annotations

import shutil

import pytest

from tests.conftest import ROOT, verdicts

pytestmark = pytest.mark.gpu

CASES = {
    "relu.default": ["((T([128, 64], f32),), {})"],
    "add.Tensor": ["((T([64, 128], f32), T([64, 128], f32)), {})"],
    "gelu.default": ["((T([64, 128], f16),), {})"],
}


@pytest.mark.parametrize("op", CASES)
def test_a_triton_kernel_is_judged_and_timed_in_its_replayed_form(op, tmp_path, judge_tiny, capsys):
    name = op.partition(".")[0]
    speeds = {}
    for runtime in ("python", "native"):
        folder = tmp_path / runtime
        shutil.copytree(ROOT / "examples" / "triton_kernels" / name, folder / "kernels" / name)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        ended = judge_tiny(
            folder / "kernels", {op: CASES[op]}, performance=True, device="cuda", runtime=runtime, timeout_s=120.0
        )
        assert verdicts(ended) == {op: {("passed", "")}}
        rows = list(ended.store.rows())
        assert {row.ran for row in rows} == {"replayed" if runtime == "native" else ""}, [r.not_replayed for r in rows]
        (speeds[runtime],) = (row.times("call") or row.headline for row in rows if row.headline is not None)
    with capsys.disabled():
        print(
            f"\n{op}: call × ATen {speeds['python'].speedup:.2f} by function, {speeds['native'].speedup:.2f} replayed"
        )
    assert speeds["native"].speedup > speeds["python"].speedup
