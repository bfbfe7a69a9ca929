"""The contract of an operator, judged through the real sandbox."""

from __future__ import annotations

import pytest

from opforge.judge.compare.contract import can_view_flat
from tests.conftest import UNARY, verdicts

REVERSED = "self.permute(list(reversed(range(self.dim()))))"
MATRIX = ["((T([4, 6], f32), T([6, 3], f32)), {})"]


@pytest.mark.parametrize(
    ("op", "cases", "body", "verdict", "words"),
    [
        ("relu.default", UNARY, "return torch.where(self <= 0, 0.0, self)", "passed", ""),
        ("relu.default", UNARY, "return torch.where(self <= 0, 0.0, self).unsqueeze(0)", "contract", "shape"),
        (
            "relu.default",
            UNARY,
            "return torch.where(self <= 0, 0.0, self).half()",
            "contract",
            "dtype f16, ATen's has f32",
        ),
        ("relu.default", UNARY, "return self.clamp_(min=0)", "contract", "wrote to `self`"),
        ("relu.default", UNARY, "return None", "contract", "expected a tensor"),
        ("relu.default", UNARY, "return [self]", "contract", "expected a tensor"),
        (
            "relu.default",
            UNARY,
            "torch.manual_seed(3); return torch.where(self <= 0, 0.0, self)",
            "contract",
            "random number",
        ),
        (
            "relu.default",
            UNARY,
            "torch.set_num_threads(3); return torch.where(self <= 0, 0.0, self)",
            "contract",
            "threads: 1 became 3",
        ),
        ("relu.default", UNARY, "self.resize_(1); return torch.zeros(3, 4)", "contract", "shape"),
        (
            "relu.default",
            UNARY,
            "class Lazy(torch.Tensor): pass\n    return torch.where(self <= 0, 0.0, self).as_subclass(Lazy)",
            "cheated",
            "a Lazy",
        ),
        ("relu_.default", UNARY, "return torch.where(self <= 0, 0.0, self)", "passed", ""),
        (
            "relu.out",
            ["((T([3], f32),), {'out': T([3], f32)})"],
            "return torch.where(self <= 0, 0.0, self)",
            "passed",
            "",
        ),
        (
            "relu.out",
            ["((T([3], f32),), {'out': T([0], f32)})"],
            "return torch.where(self <= 0, 0.0, self)",
            "passed",
            "",
        ),
        ("mm.default", MATRIX, "return torch.zeros(4, 3)", "wrong", "12 of 12 elements"),
        ("mm.default", MATRIX, "return (self.double()[:, :, None] * mat2.double()).sum(1).float()", "passed", ""),
        (
            "mm.default",
            MATRIX,
            "return (self[:, :, None] * mat2).sum(1).t().contiguous().t()",
            "contract",
            "cannot be viewed flat",
        ),
        (
            "t.default",
            ["((T([2, 3], f32),), {})"],
            f"return {REVERSED}.contiguous()",
            "contract",
            "is a view of `self`",
        ),
        ("t.default", ["((T([2, 3], f32),), {})"], f"return {REVERSED}", "passed", ""),
        (
            "mm.default",
            ["((T([4, 6], f32), T([5, 3], f32)), {})"],
            "return torch.zeros(4, 3)",
            "error",
            "ATen itself raises",
        ),
        (
            "native_layer_norm.default",
            ["((T([2, 4], f32), [4], None, None, 1e-05), {})"],
            "return self",
            "contract",
            "expected 3",
        ),
    ],
)
def test_breaches_and_what_is_none(op, cases, body, verdict, words, kernel_directory, judge_tiny):
    base = op.partition(".")[0].rstrip("_")
    arguments = {"mm": "self, mat2", "native_layer_norm": "self, shape, weight, bias, eps"}.get(base, "self")
    root = kernel_directory({base: f"import torch\ndef {base}_kernel_impl({arguments}):\n    {body}\n"})
    found = verdicts(judge_tiny(root, {op: cases}))[op]
    assert all(v == verdict and words in reason for v, reason in found), found


@pytest.mark.parametrize(
    ("op", "cases", "body", "words"),
    [
        ("relu_.default", UNARY, "return self", "did not write"),
        ("relu_.default", UNARY, "return self.clamp_(min=0).clone()", "not the tensor passed"),
        ("relu.out", ["((T([3], f32),), {'out': T([3], f32)})"], "return out", "did not write"),
    ],
)
def test_inplace_and_out_kernels_that_do_nothing_fail(op, cases, body, words, kernel_directory, judge_tiny):
    """A folder named after the form itself: the kernel, not an adapter, must keep the contract."""
    folder = op.replace(".", "__")
    root = kernel_directory({folder: f"import torch\ndef {folder}_kernel_impl(self, out=None):\n    {body}\n"})
    found = verdicts(judge_tiny(root, {op: cases}))[op]
    assert all(v == "contract" and words in reason for v, reason in found), found


def test_a_kernel_may_decline_overloads_beyond_its_family(kernel_directory, judge_tiny):
    source = """
        import torch
        def sub_kernel_impl(self, other, *, alpha=1):
            if not isinstance(other, torch.Tensor):
                raise AttributeError("only tensors")
            return torch.add(self, other, alpha=-alpha)
    """
    cases = {
        "sub.Tensor": ["((T([3], f32), T([3], f32)), {})"],
        "sub_.Tensor": ["((T([3], f32), T([3], f32)), {'alpha': 2})"],
        "sub.Scalar": ["((T([3], f32), 2.0), {})"],
    }
    ended = judge_tiny(kernel_directory({"sub": source}), cases)
    assert ended.summary.declined == ["sub.Scalar"]
    assert {t.op for t in ended.summary.judged if t.is_correct} == {"sub.Tensor", "sub_.Tensor"}
    assert ended.summary.exit_code == 0
    assert ended.summary.correctness == pytest.approx(2 / 3)


def test_random_operators_are_judged_by_their_distribution(kernel_directory, judge_tiny):
    sources = {
        "bernoulli": "import torch\ndef bernoulli_kernel_impl(self, **options):\n    return (torch.rand(self.shape) < self).to(self.dtype).contiguous()\n",
        "randn_like": "import torch\ndef randn_like_kernel_impl(self, **options):\n    return torch.rand_like(self)\n",
        "rand_like": "import torch\ndef rand_like_kernel_impl(self, **options):\n    return torch.full_like(self, 0.5)\n",
    }
    cases = {
        "bernoulli.default": ["((T([20, 20], f32, low=0.0, high=1.0),), {})"],
        "rand_like.default": ["((T([20, 20], f32),), {})"],
        "randn_like.default": ["((T([20, 20], f32),), {})"],
    }
    found = verdicts(judge_tiny(kernel_directory(sources), cases))
    assert found["bernoulli.default"] == {("passed", "")}
    ((verdict, reason),) = found["rand_like.default"]
    assert verdict == "wrong"
    assert "the same sample for every seed" in reason
    ((verdict, reason),) = found["randn_like.default"]
    assert verdict == "wrong"
    assert "Kolmogorov" in reason


def test_flat_is_what_view_can_do():
    import torch

    for tensor in (
        torch.zeros(3, 4),
        torch.zeros(4, 3).t(),
        torch.zeros(3, 1, 4),
        torch.zeros(2, 6)[:, ::2],
        torch.zeros(6)[::2],
    ):
        try:
            tensor.view(-1)
            viewable = True
        except RuntimeError:
            viewable = False
        assert can_view_flat(tensor.shape, tensor.stride()) == viewable


def test_times_come_with_an_interval(kernel_directory, judge_tiny):
    ended = judge_tiny(None, {"relu.default": ["((T([512, 512], f32),), {})"]}, performance=True)
    (row,) = [row for row in ended.store.rows() if row.phase == "performance"]
    assert row.verdict == "passed"
    assert row.figures["speedup_low"] <= row.figures["speedup"] <= row.figures["speedup_high"]
    assert row.figures["kernel_us"] > 0
    assert ended.summary.performance_interval is not None


def test_positions_may_differ_where_elements_tie_in_every_form_but_values_may_not(kernel_directory, judge_tiny):
    """The last of equal elements wins here, the first in ATen; the values themselves must be equal."""
    right = """
        import torch
        def max_kernel_impl(self, dim, keepdim=False):
            flipped = self.flip(dim)
            positions = (self.shape[dim] if self.dim() else 1) - 1 - flipped.argmax(dim, keepdim=True)
            values = self.gather(dim, positions)
            return (values, positions) if keepdim or not self.dim() else (values.squeeze(dim), positions.squeeze(dim))
    """
    ties = "T([40, 6], i64, low=0, high=3)"
    cases = {
        "max.dim": [f"(({ties}, 1), {{}})", f"(({ties}, 0, True), {{}})"],
        "max.dim_max": [f"(({ties}, 1), {{'max': T([40], i64), 'max_values': T([40], i64)}})"],
    }
    directory = kernel_directory({"max__dim": right.replace("max_kernel", "max__dim_kernel")})
    ended = judge_tiny(directory, cases, allow_fallback=True)
    assert {row.verdict for row in ended.store.rows()} == {"passed"}
    assert any("ties are broken" in note for row in ended.store.rows() for note in row.notes)


def test_wrong_values_of_a_pair_are_wrong_though_they_look_like_positions(kernel_directory, judge_tiny):
    source = """
        import torch
        def max__dim_kernel_impl(self, dim, keepdim=False):
            values, positions = torch.sort(self, dim, descending=True)
            return values.select(dim, 0) - 1, positions.select(dim, 0)
    """
    cases = {"max.dim": ["((T([40, 6], i64, low=1, high=4), 1), {})"]}
    found = verdicts(judge_tiny(kernel_directory({"max__dim": source}), cases))
    assert {verdict for verdict, _ in found["max.dim"]} == {"wrong"}


def test_a_process_lost_while_drawn_from_passes_nothing_more(kernel_directory, judge_tiny):
    source = """
        import os, torch
        calls = [0]
        def rand_like_kernel_impl(self, **options):
            calls[0] += 1
            if calls[0] > 3:
                os._exit(0)
            return torch.full_like(self, 0.25)
    """
    cases = {"rand_like.default": [f"((T([{n}], f32),), {{}})" for n in (3, 4, 5)]}
    found = verdicts(judge_tiny(kernel_directory({"rand_like": source}), cases))
    assert {verdict for verdict, _ in found["rand_like.default"]} == {"crashed"}


def test_a_patched_harness_is_seen_through(kernel_directory, judge_tiny):
    source = """
        import torch
        import opforge.sandbox.guest.worker as worker
        worker.Worker._run_timed_calls = lambda self: {"ns": 1}
        def relu_kernel_impl(self):
            return torch.where(self <= 0, 0, self)
    """
    ended = judge_tiny(kernel_directory({"relu": source}), {"relu.default": UNARY[:1]}, performance=True)
    assert {(row.verdict, row.reason) for row in ended.store.rows()} == {
        (
            "cheated",
            "while loading, tampered with its process: replaced opforge.sandbox.guest.worker.Worker._run_timed_calls",
        )
    }
