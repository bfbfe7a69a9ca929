"""Templates of kernels are Python, with the parameters of the operator's schema."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from opforge.backends.scaffold import render, scaffold
from opforge.cases import Case


@pytest.mark.parametrize(
    ("op", "parameters"),
    [
        ("add", "self, other, *, alpha=1"),
        ("clone", "self, *, memory_format=None"),
        ("contiguous", "self, *, memory_format=torch.contiguous_format"),
        ("fft_fft2", "self, s=None, dim=(-2, -1), norm=None"),
        ("div", "self, other"),
        ("uniform", "self, from_=0, to=1, *, generator=None"),
        ("mse_loss", "self, target, reduction=1"),
        ("sum", "self, *, dtype=None"),
        ("gelu", "self, *, approximate='none'"),
        ("max_pool2d", "self, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False"),
    ],
)
def test_a_template_has_the_parameters_of_its_operator(op, parameters):
    (function,) = [
        node for node in ast.parse(render(op, Path("kernels"), [])).body if isinstance(node, ast.FunctionDef)
    ]
    assert (function.name, ast.unparse(function.args)) == (f"{op}_kernel_impl", parameters)


def test_a_template_shows_a_case_and_a_kernel_that_is_there_stays(tmp_path):
    case = "((T([3], f32), 2), {})"
    cases = {op: [Case.make(op, case)] for op in ("add.Scalar", "add_.Scalar", "mul.Scalar")}
    made, kept = scaffold(tmp_path, cases)
    assert [path.relative_to(tmp_path).as_posix() for path in made] == [
        "add/add_implementation_1.py",
        "mul/mul_implementation_1.py",
    ]
    assert kept == []
    assert case in made[0].read_text()
    made[0].write_text("# mine\n")
    made[1].unlink()
    assert scaffold(tmp_path, cases) == ([made[1]], [tmp_path / "add"])
    assert made[0].read_text() == "# mine\n"
