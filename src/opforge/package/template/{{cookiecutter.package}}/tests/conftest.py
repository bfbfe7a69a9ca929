"""Tests run on the CPU always{% if cookiecutter.variant == "cpp" %}, and on a GPU where there is one{% else %}: kernels are interpreted where there is no GPU{% endif %}."""

{% if cookiecutter.variant == "triton" %}
import os

{% endif %}
import pytest
{% if cookiecutter.variant == "cpp" %}
import support
{% endif %}
import torch

{% if cookiecutter.variant == "triton" %}
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported, which happens with the package

import support

{% endif %}

def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that wants a device on each one that there is."""
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", support.DEVICES)


@pytest.fixture(autouse=True)
def _alike() -> None:
    """Give every test the same random numbers, and nothing that another test compiled."""
    torch.manual_seed(0)
    torch.compiler.reset()
