"""End to end on a GPU: smoke, a slice of OpInfo, the example kernels. Run with `pytest -m gpu` on a machine that has one."""

from __future__ import annotations

import json
import re

import pytest

from tests.command import opforge
from tests.conftest import ROOT

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_a_gpu():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")


def test_smoke(tmp_path):
    done = opforge(
        "run",
        "--suite",
        "smoke",
        "--backend",
        "aten",
        "--device",
        "cuda",
        "--out",
        str(tmp_path / "run"),
        "--format",
        "json",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["scores"]["performance"] > 0


def test_example_kernels_are_right_and_triton_is_compiled(tmp_path):
    words = ("--ops-directory", str(ROOT / "examples" / "generated_kernels"), "--device", "cuda", "--dtypes", "bf16")
    done = opforge(
        "run", "--suite", "opinfo", "--backend", "directory", *words, "--out", str(tmp_path / "run"), "--format", "json"
    )
    answer = json.loads(done.stdout)
    assert [o for o in answer["operators"] if o["reasons"] and not o["declined"]] == []
    assert done.returncode == 0, done.stderr


def test_a_kernel_that_writes_out_of_bounds_is_its_own_verdict(tmp_path, kernel_directory):
    source = """
        import torch, triton, triton.language as tl

        @triton.jit
        def wild(pointer):
            tl.store(pointer + (1 << 40), 1.0)

        def relu_kernel_impl(self):
            wild[(1,)](self)
            torch.cuda.synchronize()
            return self.clone()
    """
    root = kernel_directory({"relu": source})
    words = ("--ops-directory", str(root), "--device", "cuda", "--out", str(tmp_path / "run"))
    done = opforge("run", "--suite", "smoke", "--backend", "directory", *words, "--format", "json")
    assert done.returncode == 1, done.stderr
    (row,) = json.loads(done.stdout)["operators"]
    assert row["passed"] == 0
    assert "illegal memory access" in row["reasons"][0]["reason"]


def judged_rows(tmp_path, root, calls):
    """Judge a folder's kernels on recorded calls; return the lines of the run."""
    words = ("--ops-directory", str(root), "--device", "cuda", "--out", str(tmp_path / "run"))
    opforge("run", "--suite", str(calls), "--backend", "directory", *words)
    return [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]


def test_of_calls_made_in_a_row_only_the_one_that_fails_is_blamed(tmp_path, kernel_directory):
    source = """
        import torch, triton, triton.language as tl

        @triton.jit
        def wild(pointer):
            tl.store(pointer + (1 << 40), 1.0)

        def neg_kernel_impl(self):
            if tuple(self.shape) == (5, 5):
                wild[(1,)](self)  # nobody waits for it here
            return self * -1
    """
    calls = tmp_path / "calls.txt"
    shapes = ("[3, 4]", "[5, 5]", "[2]")
    calls.write_text(
        "Operator: aten.neg.default\n" + "".join(f"cnt: 1, ((T({shape}, f32),), {{}})\n" for shape in shapes)
    )
    rows = judged_rows(tmp_path, kernel_directory({"neg": source}), calls)
    found = {row["case"]: row["verdict"] for row in rows if row["phase"] == "correctness"}
    assert [found[f"((T({shape}, f32),), {{}})"] == "passed" for shape in shapes] == [True, False, True], rows


def test_a_result_that_the_next_call_completes_is_wrong(tmp_path, kernel_directory):
    source = """
        import torch
        kept = []
        def neg_kernel_impl(self):
            for result, right in kept:
                result.copy_(right)
            right = self * -1
            kept[:] = [(torch.zeros_like(right), right)]
            return kept[0][0]
    """
    calls = tmp_path / "calls.txt"
    calls.write_text("Operator: aten.neg.default\ncnt: 1, ((T([64, 64], f32),), {})\n")
    rows = judged_rows(tmp_path, kernel_directory({"neg": source}), calls)
    assert {row["verdict"] for row in rows} <= {"wrong", "contract", "cheated"}, rows


def test_what_is_no_answer_of_atens_is_asked_of_nobody(tmp_path):
    """A seed that attention leaves uninitialised, and draws from the CPU's generator while the device is a GPU."""
    query = "T([16, 12, 197, 64], f16, stride=(151296, 64, 768, 1))"
    calls = tmp_path / "calls.txt"
    calls.write_text(
        "Operator: aten._scaled_dot_product_cudnn_attention.default\n"
        f"cnt: 12, (({query}, {query}, {query}, None, False), {{'scale': 0.125}})\n"
        "Operator: aten.multinomial.default\n"
        "cnt: 1, ((T([144], f32, device='cpu', low=0.01, high=1.0), 144), {})\n"
    )
    words = ("--suite", str(calls), "--backend", "aten", "--device", "cuda", "--out", str(tmp_path / "run"))
    done = opforge("run", *words, "--format", "json")
    assert [o["reasons"] for o in json.loads(done.stdout)["operators"]] == [[], []]
    assert done.returncode == 0, done.stderr


def test_what_atens_formulas_call_in_a_backward_pass_is_no_deed_of_the_kernels(tmp_path):
    """Gradients of addmm are products, which ATen makes in a thread of its own on a GPU if it may."""
    words = ("--ops-directory", str(ROOT / "examples" / "triton_kernels"), "--ops", "addmm.default", "--dtypes", "f32")
    out = tmp_path / "run"
    done = opforge("run", "--suite", "opinfo", "--backend", "directory", *words, "--device", "cuda", "--out", str(out))
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert rows, done.stderr
    assert [row["reason"] for row in rows if row["verdict"] == "cheated"] == []


def test_a_kernel_that_tunes_itself_is_tuned_for_short_where_it_is_judged_and_in_full_where_it_is_timed(
    kernel_directory, tmp_path
):
    source = """
        import torch, triton
        import triton.language as tl

        launched = [0]

        @triton.autotune([triton.Config({"BLOCK": 256}), triton.Config({"BLOCK": 512})], key=["n"], pre_hook=lambda *a, **k: launched.append(0))
        @triton.jit
        def kernel(x, y, n, BLOCK: tl.constexpr):
            at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            tl.store(y + at, -tl.load(x + at, mask=at < n), mask=at < n)

        def neg_kernel_impl(self):
            if self.dtype != torch.float32 or not self.is_contiguous() or not self.numel():
                raise NotImplementedError
            y = torch.empty_like(self)
            kernel[lambda meta: (triton.cdiv(self.numel(), meta["BLOCK"]),)](self, y, self.numel())
            if self.numel() == 4096:
                raise RuntimeError(f"launched {len(launched)} times")
            return y
    """
    calls = tmp_path / "calls.txt"
    calls.write_text("Operator: aten.neg.default\ncnt: 1, ((T([4096], f32),), {})\n")
    rows = judged_rows(tmp_path, kernel_directory({"neg": source}), calls)
    launched = {row["phase"]: int(re.search(r"launched (\d+) times", row["reason"])[1]) for row in rows}
    assert launched["correctness"] < 500 < launched["performance"]
