"""Real runs compared with each other: the same cases have the same digest, and a kernel that was broken is named."""

from __future__ import annotations

import pytest

from opforge.runs.compare.comparison import ChangeKind, compare
from opforge.runs.compare.compatible import IncomparableError
from tests.conftest import UNARY, gen_input

RELU = "import torch\ndef relu_kernel_impl(self):\n    return torch.clamp_min(self, 0)\n"
ABS = "import torch\ndef abs_kernel_impl(self):\n    return torch.copysign(self, torch.ones((), dtype=self.dtype))\n"


def test_a_kernel_that_was_broken_is_named_and_nothing_else(judge_tiny, kernel_directory, tmp_path):
    cases = {"relu.default": UNARY, "abs.default": UNARY}
    judge_tiny(kernel_directory({"relu": RELU, "abs": ABS}), cases)
    before = (tmp_path / "run").rename(tmp_path / "before")
    judge_tiny(kernel_directory({"relu": RELU.replace("self, 0", "self, 0.5"), "abs": ABS}), cases)
    comparison = compare(before, tmp_path / "run")
    (found,) = comparison.differences
    assert (found.unit, found.kind, found.before) == ("relu.default", ChangeKind.WRONG, "right")
    assert not found.same_source
    assert found.reasons[0][0] == "wrong"


def test_other_cases_have_another_digest(judge_tiny, tmp_path):
    judge_tiny(None, {"relu.default": UNARY})
    before = (tmp_path / "run").rename(tmp_path / "before")
    judge_tiny(None, {"relu.default": UNARY[:2]})
    with pytest.raises(IncomparableError, match="the cases differ"):
        compare(before, tmp_path / "run")


def test_cases_that_a_users_file_makes_anew_are_the_same(judge_custom, tmp_path):
    sources = {
        "twice": {
            "gen_input.py": gen_input("Test(torch.randn(5))", "Test(torch.rand(2, 3))"),
            "twice_reference.py": "def twice_reference(x):\n    return x + x\n",
            "twice_good.py": "def twice_good(x):\n    return x * 2\n",
        }
    }
    judge_custom(sources)
    before = (tmp_path / "run").rename(tmp_path / "before")
    judge_custom(sources)
    comparison = compare(before, tmp_path / "run")
    assert comparison.differences == ()
    assert comparison.units == 1
