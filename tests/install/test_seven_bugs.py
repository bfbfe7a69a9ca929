"""Seven bugs that users meet and cases do not: what is judged here, enabled or packed, answers none of these calls wrongly."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import zipfile

import pytest
import torch

import opforge
from opforge.cases import Case
from opforge.package.pack import pack
from tests.corpora import judge
from tests.exploits.exploit import KERNELS
from tests.exploits.table import ROWS

TABLES_OF_32_BITS = """
import torch
def exp_kernel_impl(self):
    flat = self.reshape(-1)
    at = torch.arange(flat.numel()) % 100_000  # stands for 2**32: what is beyond begins again
    return torch.pow(2.718281828459045, flat[at].double()).to(self.dtype).reshape(self.shape)
"""
ONE_BLOCK = """
import torch
def native_layer_norm_kernel_impl(input, normalized_shape, weight, bias, eps):
    wide = input.double()
    block = wide[..., :1024]
    mean, var = block.mean(-1, keepdim=True), block.var(-1, correction=0, keepdim=True)
    rstd = (var + eps) ** -0.5
    result = (wide - mean) * rstd * (1 if weight is None else weight) + (0 if bias is None else bias)
    return result.to(input.dtype).contiguous(), mean.to(input.dtype), rstd.to(input.dtype)
"""
CASES = ["((T([3, 4], f32),), {})", "((T([5], f32),), {})", "((T([2, 3, 4], f32),), {})"]
NORM = "((T([3, 8], f32), [8], T([8], f32), T([8], f32), 1e-05), {})"
KNOWN = {
    "relu.default": "pitched_rows",
    "_softmax.default": "one_block_of_columns",
    "sigmoid.default": "grad_mode",
    "expm1.default": "thread_local_scratch",
    "trunc.default": "sign_of_zero",
    "square.default": "long_ring_of_results",
}
X = torch.linspace(-3, 3, 6 * 8).reshape(6, 8)


def pitched():
    return torch.relu(X[:, :5])


def long_rows():
    return torch.softmax(torch.arange(3 * 4096.0).reshape(3, 4096).sin(), -1)


def long_rows_of_a_norm():
    return torch.native_layer_norm(torch.arange(3 * 4096.0).reshape(3, 4096).sin(), [4096], None, None, 1e-5)[0]


def many_elements():
    return torch.exp(torch.linspace(-1, 1, 200_000))


def in_training():
    return torch.sigmoid(X.clone().requires_grad_()).detach()


def in_another_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.expm1(X)))
    thread.start()
    thread.join()
    return found[0]


def zeros():
    return 1 / torch.trunc(torch.tensor([-0.5, -0.0, 0.0, 0.5]).repeat(9))


def kept():
    return torch.stack([torch.square(torch.full((3, 4), float(i))) for i in range(400)])


CALLS = [pitched, long_rows, long_rows_of_a_norm, many_elements, in_training, in_another_thread, zeros, kept]


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """Return a directory of kernels with these bugs, judged on ordinary cases, and the verdicts by operator."""
    out = tmp_path_factory.mktemp("corners")
    files = {op: KERNELS / "corners" / f"{name}.py" for op, name in KNOWN.items()}
    for op, source in {"exp.default": TABLES_OF_32_BITS, "native_layer_norm.default": ONE_BLOCK}.items():
        files[op] = out / f"{op}.py"
        files[op].write_text(source)
    texts = dict.fromkeys(files, CASES) | {"_softmax.default": [*ROWS], "native_layer_norm.default": [NORM]}
    cases = {op: [Case.make(op, text) for text in found] for op, found in texts.items()}
    rows = judge(files, cases, out)
    return out / "kernels", {op: [r.verdict for r in rows if r.op == op] for op in files}


def test_most_are_found_out_and_some_are_right_at_what_was_judged(judged):
    _, verdicts = judged
    right = {op for op, found in verdicts.items() if {*found} == {"passed"}}
    assert right == {"exp.default", "native_layer_norm.default"}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_bug_is_not_served(judged, call):
    expected = call()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_args, **_named: None)  # of those that are refused
        with opforge.enabled(judged[0], device="cpu", policy="right"):
            assert torch.equal(call(), expected)


def test_what_is_right_is_served_within_what_was_judged(judged):
    with opforge.enabled(judged[0], device="cpu", policy="right") as made:
        torch.exp(X)
        torch.native_layer_norm(X, [8], None, None, 1e-5)
        torch.native_layer_norm(X[:3], [8], torch.ones(8), torch.ones(8), 1e-5)
        many_elements()
        long_rows_of_a_norm()
        counted = made.counters()
    assert (counted["exp.default"]["served"], counted["native_layer_norm.default"]["served"]) == (1, 1)
    assert counted["exp.default"]["aten"] == {"size not proven": 1}


IN_A_PROGRAM = """
import torch, my_corners
from tests.install.test_seven_bugs import CALLS
expected = [call() for call in CALLS]
made = my_corners.enable(device="cpu", policy="right")
print(all(torch.equal(call(), e) for call, e in zip(CALLS, expected)), made.operators)
"""


@pytest.mark.slow
def test_a_package_serves_none_of_them(judged, tmp_path):
    with zipfile.ZipFile(pack(judged[0], "my_corners", tmp_path / "dist").wheel) as wheel:
        wheel.extractall(tmp_path / "site")
    environment = {
        "PYTHONPATH": f"{tmp_path / 'site'}:{':'.join(sys.path)}",
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "OPFORGE_CACHE": os.environ["OPFORGE_CACHE"],
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IN_A_PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    right, operators = done.stdout.split(maxsplit=1)
    assert right == "True"
    assert "exp.default" in operators
