"""The backend `flag_gems`: its operators are those of the package's own list. The package itself runs on GPUs only (tests/gpu);
here a package of the same shape stands in its place, to see what becomes of such a list."""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec

import pytest
import torch

from opforge import registry
from opforge.backends import BackendOptions
from opforge.backends.flag_gems import FlagGemsBackend, _source_digest
from opforge.errors import OpforgeError
from opforge.sandbox.guest.loader import LoadedKernel

PACKAGE = """
import torch
def relu(x):
    return torch.where(x > 0, x, torch.where(x.isnan(), x, 0)).to(x.dtype)
def sigmoid(x):
    return x
vendor_name = "nvidia"
_FULL_CONFIG = (
    ("relu", relu), ("sigmoid", sigmoid), ("gone_from_torch.Tensor", relu), ("tanh", relu, lambda: False), ("relu", relu),
)
"""
BROKEN = (
    "raise RuntimeError('No device were detected on your machine !\\n Please check that your driver is complete.')\n"
)


ROWS = """
import enum, torch
def right(x):
    return torch.relu(x)
def wrong(x):
    return x + 1
class Autograd(enum.Enum):
    enable, disable = True, False
vendor_name = "nvidia"
_FULL_CONFIG = (
    ("relu", wrong, lambda: False), ("relu", right, None), ("relu", wrong, lambda: False), ("relu", wrong),
    ("tanh", wrong, lambda: False), ("sigmoid", wrong, "AutogradCUDA"), ("exp", wrong, None, torch._C.DispatchKey.AutogradCUDA),
    ("abs", wrong, Autograd.enable), ("neg", right, Autograd.disable), ("sin", wrong, None, ["Autograd"]),
    ("cos", right, lambda: True, ["CUDA", "AutogradCUDA"]),
)
import atexit, sys
if sys.argv[0] == "-c":  # asked for its list
    print("loaded")
    atexit.register(print, "bye")
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Return a function that installs a package of that name for this process and those that it starts."""

    def write(source):
        (tmp_path / "flag_gems").mkdir()
        (tmp_path / "flag_gems" / "__init__.py").write_text(source)
        info = tmp_path / "flag_gems-5.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flag_gems\nVersion: 5.0\n")
        (info / "RECORD").write_text("")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.setenv("OPFORGE_CACHE", str(tmp_path / "cache"))

    _source_digest.cache_clear()
    yield write
    _source_digest.cache_clear()
    sys.modules.pop("flag_gems", None)


@pytest.mark.slow
def test_operators_come_from_the_packages_own_list(site):
    site(PACKAGE)
    backend = FlagGemsBackend(BackendOptions())
    kernels = backend.kernels(["relu.default", "tanh.default", "sub.Tensor", "sigmoid.default"])
    assert [(k.primary, [s.op for s in k.serves]) for k in kernels] == [
        ("relu.default", ["relu.default"]), ("sigmoid.default", ["sigmoid.default"]),
    ]  # fmt: skip
    assert backend.skipped == ["gone_from_torch.Tensor is not an operator of this torch"]
    relu, sigmoid = (LoadedKernel(k.wire()).callable_for(k.primary) for k in kernels)
    x = torch.tensor([-1.0, 2.0])
    assert torch.equal(relu(x), torch.relu(x))
    assert sigmoid(x) is x
    assert kernels[0].digest != kernels[1].digest


@pytest.mark.slow
def test_rows_that_do_not_hold_here_and_those_for_autograd_are_no_kernels(site):
    site(ROWS)
    names = ["relu", "tanh", "sigmoid", "exp", "abs", "neg", "sin", "cos"]
    kernels = FlagGemsBackend(BackendOptions()).kernels([f"{name}.default" for name in names])
    assert [k.primary for k in kernels] == ["relu.default", "neg.default", "cos.default"]
    x = torch.tensor([-1.0, 2.0])
    for kernel in kernels:
        assert torch.equal(LoadedKernel(kernel.wire()).callable_for(kernel.primary)(x), torch.relu(x))


@pytest.mark.parametrize(
    "rows, reason",
    [
        ('("relu", print)', "TypeError: row 0 is 'relu', and not an operator's name with a function"),
        ('(("relu", print, lambda: 1 / 0),)', "ZeroDivisionError: division by zero"),
        ("None", "TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_a_list_that_cannot_be_read_is_not_called_a_package_that_cannot_be_imported(site, rows, reason):
    site(f"vendor_name = 'nvidia'\n_FULL_CONFIG = {rows}\n")
    with pytest.raises(OpforgeError, match=re.escape(f"flag_gems._FULL_CONFIG, cannot be read ({reason})")) as raised:
        FlagGemsBackend(BackendOptions()).kernels(["relu.default"])
    assert "cannot be imported" not in str(raised.value)


@pytest.mark.slow
def test_a_kernels_digest_follows_every_source_of_the_package(site, tmp_path):
    site(PACKAGE)
    inner = tmp_path / "flag_gems" / "ops"
    inner.mkdir()
    digests = set()
    for text in ("", "x = 1\n", "x = 2\n"):
        (inner / "relu.py").write_text(text)
        _source_digest.cache_clear()
        (kernel,) = FlagGemsBackend(BackendOptions()).kernels(["relu.default"])
        digests.add(kernel.digest)
    assert len(digests) == 3


def test_without_a_gpu_it_says_so(site):
    site(BROKEN)
    with pytest.raises(
        OpforgeError, match=r"\(RuntimeError: No device were detected on your machine !\); it needs a GPU"
    ):
        FlagGemsBackend(BackendOptions()).kernels(["relu.default"])


@pytest.mark.skipif(find_spec("flag_gems") is not None, reason="flag_gems is installed here")
def test_without_the_package_it_names_the_command():
    with pytest.raises(OpforgeError, match=re.escape("pip install 'opforge[flag_gems]'")):
        registry.load("backends", "flag_gems")(BackendOptions()).kernels(["relu.default"])
