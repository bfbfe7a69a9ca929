"""Kernels of custom operators are compared with the user's reference, which answers from a process of its own."""

from __future__ import annotations

import pytest

from tests.conftest import by_kernel, gen_input, slow

VECTORS = gen_input("Test(lambda: torch.randn(6, 5))", "Test(lambda: torch.randn(12))")
REPLAYING = """
KEPT = {}
def twice_kernel_impl(x):
    key = x.data_ptr(), x.shape
    if key not in KEPT:
        KEPT[key] = 2 * x
    return KEPT[key].clone()
"""
TWICE = "def twice_reference(x):\n    return 2 * x\n"


def one(reference: str, kernel: str, tests: str = VECTORS) -> dict[str, dict[str, str]]:
    return {"twice": {"gen_input.py": tests, "twice_reference.py": reference, "twice_py.py": kernel}}


@pytest.mark.parametrize(
    ("kernel", "verdict", "words"),
    [
        ("def twice_kernel_impl(x):\n    return x + x\n", "passed", ""),
        ("def twice_kernel_impl(x):\n    return 2.0001 * x\n", "wrong", "the reference has"),
        ("def twice_kernel_impl(x):\n    return (2 * x).double()\n", "contract", "dtype f64, the reference's has f32"),
        ("def twice_kernel_impl(x):\n    return (2 * x)[:1]\n", "contract", "the reference's has [6, 5]"),
        ("def twice_kernel_impl(x):\n    return x.mul_(2)\n", "contract", "wrote to `args[0]`, which the reference left alone"),
        ("def twice_kernel_impl(x):\n    return x\n", "contract", "result is `args[0]` itself, not a new tensor"),
        ("def twice_kernel_impl(x):\n    return 2 * x, x\n", "contract", "result is list, expected a tensor"),
        ("def twice_kernel_impl(x):\n    raise ValueError('no')\n", "error", "raised ValueError: no"),
        ("def twice_kernel_impl(x):\n    raise NotImplementedError('later')\n", "unsupported", "the kernel declines"),
        ("def other(x):\n    return x\n", "error", "twice_py.py does not define twice_kernel_impl; it defines other"),
        ("import os\ndef twice_kernel_impl(x):\n    os._exit(0)\n", "crashed", "exited with status 0"),
        slow("import time\ndef twice_kernel_impl(x):\n    time.sleep(60)\n", "timed_out", "no answer within 2 s"),
        ("import torch\ndef twice_kernel_impl(x):\n    torch.set_default_dtype(torch.float64)\n    return 2 * x\n", "contract",
         "changed global state: default_dtype"),
        ("import torch\ndef twice_kernel_impl(x):\n    torch.rand(1)\n    return 2 * x\n", "contract",
         "the random number generator was advanced"),
        (REPLAYING, "cheated", "replayed result"),
        ("def twice_kernel_impl(x):\n    return (2 * x).t() if x.dim() == 2 and x.stride(0) == 1 else 2 * x\n", "contract",
         "with transposed inputs"),
        ("import torch\ndef twice_kernel_impl(x):\n    return 2 * x.as_strided((x.numel(),), (1,)).reshape(x.shape)\n", "wrong", "inputs"),
    ],
)  # fmt: skip
def test_a_kernel_is_judged_by_the_reference(judge_custom, kernel, verdict, words):
    found = by_kernel(judge_custom(one(TWICE, kernel), timeout_s=2.0))["twice__py"]
    assert verdict in {v for v, _ in found}, found
    assert any(v == verdict and words in reason for v, reason in found), found


def test_a_kernel_in_cpp_is_listed_and_says_that_it_is_not_built(judge_custom):
    sources = one(TWICE, "def twice_kernel_impl(x):\n    return x + x\n")
    sources["twice"]["twice_native.cpp"] = "int main() {}"
    found = by_kernel(judge_custom(sources))
    assert found["twice__py"] == {("passed", "")}
    assert {v for v, _ in found["twice__native"]} == {"error"}


@pytest.mark.parametrize(
    ("reference", "verdict", "words"),
    [
        ("def twice_reference(x):\n    raise ValueError('odd')\n", "error", "the reference raised ValueError: odd (line 2)"),
        ("import os\ndef twice_reference(x):\n    os._exit(0)\n", "error", "the reference gave no result for this case: its process exited"),
        slow("import time\ndef twice_reference(x):\n    time.sleep(60)\n", "error", "the reference gave no result for this case: no answer within 2 s"),
        ("def twice_reference(x):\n    return object()\n", "error", "the reference returned builtins.object, which cannot be compared"),
        ("def twice_reference(:\n", "error", "the reference cannot be loaded: twice_reference.py, line 1: SyntaxError"),
        ("twice_reference = 3\n", "error", "the reference cannot be loaded: twice_reference in twice_reference.py is int"),
        ("import torch\ndef twice_reference(x):\n    torch.set_default_dtype(torch.float64)\n    return 2 * x\n", "error",
         "the reference changed global state"),
    ],
)  # fmt: skip
def test_a_reference_at_fault_is_named_and_the_kernel_is_not_blamed(judge_custom, reference, verdict, words):
    right = "def twice_kernel_impl(x):\n    return x + x\n"
    found = by_kernel(judge_custom(one(reference, right), timeout_s=2.0))["twice__py"]
    assert {v for v, _ in found} == {verdict}, found
    assert all(reason.startswith("the reference") for _, reason in found), found
    assert any(words in reason for _, reason in found), found


def test_where_the_reference_raises_raising_is_right(judge_custom):
    positive = "    if (x < 0).any():\n        raise ValueError('negative')\n    return 2 * x\n"
    tests = gen_input("Test(lambda: torch.ones(3))", "Test(lambda: -torch.ones(3))")
    ended = judge_custom(one(f"def twice_reference(x):\n{positive}", f"def twice_kernel_impl(x):\n{positive}", tests))
    assert by_kernel(ended)["twice__py"] == {("passed", "")}


def test_a_reference_that_depends_on_the_layout_is_at_fault_there(judge_custom):
    reference = """
        def twice_reference(x):
            return 2 * x if x.is_contiguous() else 3 * x
    """
    ended = judge_custom(one(reference, "def twice_kernel_impl(x):\n    return x + x\n"))
    rows = list(ended.store.rows())
    assert {row.verdict for row in rows} == {"passed"}
    notes = [note for row in rows for note in row.notes]
    assert any(
        "with strided inputs: the reference's own answer is another one there, a fault of the reference's" in n
        for n in notes
    )


@pytest.mark.slow
def test_an_in_place_operator_is_held_to_what_its_reference_writes(judge_custom):
    sources = one(
        "def twice_reference(x):\n    return x.mul_(2)\n", "def twice_kernel_impl(x):\n    return x.add_(x)\n"
    )
    sources["twice"]["twice_copy.py"] = "def twice_kernel_impl(x):\n    return x * 2\n"
    sources["twice"]["twice_half.py"] = "def twice_kernel_impl(x):\n    x.copy_(x * 2)\n    return x.clone()\n"
    found = by_kernel(judge_custom(sources))
    assert found["twice__py"] == {("passed", "")}
    assert any("did not write to `args[0]`" in reason for _, reason in found["twice__copy"])
    assert any("is not the tensor passed" in reason for _, reason in found["twice__half"])


def test_a_view_is_to_be_a_view(judge_custom):
    sources = one("def twice_reference(x):\n    return x[1:]\n", "def twice_kernel_impl(x):\n    return x[1:]\n")
    sources["twice"]["twice_copy.py"] = "def twice_kernel_impl(x):\n    return x[1:].clone()\n"
    found = by_kernel(judge_custom(sources))
    assert found["twice__py"] == {("passed", "")}
    assert any(
        "result is new memory; the reference's is a view of `args[0]`" in reason for _, reason in found["twice__copy"]
    )


def test_results_of_many_kinds_come_over_the_wire(judge_custom):
    body = "    return [x.t(), (x.sum(), None)], x.shape[0], 1.5, 2j, x.dtype, x.new_ones(1).expand(4), True\n"
    tests = gen_input("Test(lambda: torch.randn(3, 4))")
    ended = judge_custom(one(f"def twice_reference(x):\n{body}", f"def twice_kernel_impl(x):\n{body}", tests))
    assert by_kernel(ended)["twice__py"] == {("passed", "")}


def test_a_reference_that_rounds_inside_has_no_float64_form(judge_custom):
    """Held to a float64 answer that is none, a kernel that rounds elsewhere would be wrong; tolerances decide instead."""
    reference = "def twice_reference(x):\n    return (x.float().exp() * 3).to(x.dtype)\n"
    kernel = "import math\ndef twice_kernel_impl(x):\n    return (x + math.log(3)).exp()\n"
    rows = list(judge_custom(one(reference, kernel, gen_input("Test(lambda: torch.rand(200))"))).store.rows())
    assert {row.verdict for row in rows} == {"passed"}, rows
    assert all("rtol" in row.figures for row in rows)


def test_a_reference_that_takes_float64_is_compared_in_it(judge_custom):
    kernel = "def twice_kernel_impl(x):\n    return x + x\n"
    rows = list(judge_custom(one(TWICE, kernel)).store.rows())
    assert all("rtol" not in row.figures and row.figures["aten_error"] == 0.0 for row in rows)


@pytest.mark.slow
def test_an_operator_that_draws_is_judged_by_its_distribution(judge_custom):
    tests = gen_input("Test(lambda: torch.zeros(200))")
    sources = one(
        "import torch\ndef twice_reference(x):\n    return x + torch.randn(x.shape)\n",
        "import torch\ndef twice_kernel_impl(x):\n    return torch.empty(x.numel() + 1).normal_()[:-1].reshape(x.shape) + x\n",
        tests,
    )
    sources["twice"]["twice_uniform.py"] = (
        "import torch\ndef twice_kernel_impl(x):\n    return torch.rand(x.shape) + x\n"
    )
    sources["twice"]["twice_zero.py"] = "def twice_kernel_impl(x):\n    return x + 0\n"
    ended = judge_custom(sources)
    found = by_kernel(ended)
    assert found["twice__py"] == {("passed", "")}
    assert {v for v, _ in found["twice__uniform"]} == {"wrong"}
    assert "passed" not in {v for v, _ in found["twice__zero"]}


def test_a_name_of_atens_is_no_operator_of_atens(judge_custom):
    """A custom operator called sort is not judged by the rules for ATen's, nor barred from calling it."""
    files = {
        "gen_input.py": gen_input("Test(lambda: torch.randn(9))"),
        "sort_reference.py": "def sort_reference(x):\n    return x.sort().values\n",
        "sort_py.py": "def sort_kernel_impl(x):\n    return x.sort(descending=True).values.flip(0)\n",
    }
    ended = judge_custom({"sort": files})
    assert [row.op for row in ended.store.rows()] == ["sort"]
    assert by_kernel(ended)["sort__py"] == {("passed", "")}
