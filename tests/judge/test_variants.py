"""Hostile forms find what cases as they stand do not; what ATen gets wrong itself is nobody's fault but its own."""

from __future__ import annotations

import pytest

from tests.conftest import verdicts

ONE = ["((T([3, 4], f32),), {})"]
ROWS = ["((T([3, 4], i64), [1]), {})"]
PAIR = ["((T([3, 4], f32), T([3, 4], f32)), {})"]


@pytest.mark.parametrize(
    ("op", "cases", "source", "words"),
    [
        ("relu", ONE, "(self): return torch.where(self > 0, self, 0.0)", "with NaN among the inputs"),
        ("abs", ONE, "(self): return torch.where(self.contiguous().as_strided(self.shape, self.stride()) < 0, -self, self)", "inputs"),
        ("neg", ONE, "(self): return 0 - self if self.dim() else self", "with 0-dim inputs"),
        ("exp", ONE, "(self): return torch.pow(2.718281828459045, self.reshape(3, 4))", "inputs"),
        ("add.Tensor", PAIR, "(self, other, alpha=1): return self - (-other)", "with another value for `alpha`"),
        ("maximum", PAIR, "(self, other): return torch.where(self > other, self, other)", "with NaN among the inputs"),
        ("logaddexp", PAIR, "(self, other): return (self.exp() + other.exp()).log()", "with extreme values among the inputs"),
        ("sum.dim_IntList", ROWS, "(self, dim, keepdim=False, **rest): return self.cumsum(1)[:, -1]", "with another value for `keepdim`"),
    ],
)  # fmt: skip
def test_a_kernel_that_is_right_as_it_stands_is_found_out(op, cases, source, words, kernel_directory, judge_tiny):
    folder, full = op.replace(".", "__"), op if "." in op else f"{op}.default"
    root = kernel_directory({folder: f"import torch\ndef {op.partition('.')[0]}_kernel_impl{source}\n"})
    ((verdict, reason),) = verdicts(judge_tiny(root, {full: cases}))[full]
    assert verdict in ("wrong", "error", "contract")
    assert words in reason


def test_a_form_may_be_declined_and_forms_are_listed(kernel_directory, judge_tiny):
    source = """
        import torch
        def relu_kernel_impl(self):
            if not self.is_contiguous():
                raise NotImplementedError("contiguous inputs only")
            return torch.where(self <= 0, 0.0, self)
    """
    (row,) = judge_tiny(kernel_directory({"relu": source}), {"relu.default": ONE}).store.rows()
    assert row.verdict == "passed"
    assert {"offset", "nan", "empty"} <= set(row.variants)
    assert "declines with transposed inputs" in row.notes


def test_a_large_out_does_not_hold_the_answer_before_the_call(kernel_directory, judge_tiny):
    source = """
        import torch
        def flip_kernel_impl(self, dims, *, out):
            if self.numel() > 60_000:
                return out
            for dim in dims if self.dim() else ():
                self = self.index_select(dim, torch.arange(self.shape[dim] - 1, -1, -1))
            return out.resize_(self.shape).copy_(self)
    """
    cases = {"flip.out": ["((T([5, 5], f32), [1]), {'out': T([5, 5], f32)})"]}
    ((verdict, reason),) = verdicts(judge_tiny(kernel_directory({"flip__out": source}), cases))["flip.out"]
    assert verdict == "contract", reason
    assert "thousands of elements: did not write to `out`" in reason


def test_where_aten_answers_otherwise_in_another_layout_nobody_is_blamed(kernel_directory, judge_tiny):
    source = """
        import torch
        def _softmax_kernel_impl(self, dim, half_to_float):
            if self.numel() == 0:
                return torch.empty_like(self)
            e = torch.exp(self.double() - self.double().amax(dim, keepdim=True))
            return (e / e.sum(dim, keepdim=True)).to(self.dtype).contiguous()
    """
    cases = {"_softmax.out": ["((T([5, 5], f32), 0, False), {'out': T([5, 5], f32)})"]}
    (row,) = judge_tiny(kernel_directory({"_softmax": source}), cases).store.rows()
    assert row.verdict == "passed", row.reason
    assert any("a defect of PyTorch" in note for note in row.notes)


def test_a_kernel_may_fall_back_when_it_is_allowed_to(kernel_directory, judge_tiny):
    root = kernel_directory({"relu": "import torch\ndef relu_kernel_impl(self):\n    return torch.relu(self)\n"})
    assert verdicts(judge_tiny(root, {"relu.default": ONE}))["relu.default"] == {
        ("cheated", "calls aten::relu, the operator that it replaces (--allow-fallback permits it)")
    }


def test_and_then_it_passes(kernel_directory, judge_tiny):
    root = kernel_directory({"relu": "import torch\ndef relu_kernel_impl(self):\n    return torch.relu(self)\n"})
    ended = judge_tiny(root, {"relu.default": ONE}, allow_fallback=True)
    assert verdicts(ended)["relu.default"] == {("passed", "")}
    assert ended.manifest.config["allow_fallback"] is True
