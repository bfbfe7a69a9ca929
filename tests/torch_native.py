"""An override that torch itself makes from Python, by the API of `torch._native`, also where torch makes none."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

_ROUTER = """
import torch
import torch._native.registry as registry
registry.register_op_override("triton", "aten", "relu", "CPU", lambda x: {condition}, lambda x: torch.full_like(x, 7))
def order(_op, _key, nodes):
    return nodes
"""

needs_torch_native = pytest.mark.skipif(
    find_spec("torch._native") is None, reason="this torch overrides nothing itself"
)


def overriding_relu(folder: Path, condition: str = "x.numel() == 3") -> dict[str, str]:
    """Return an environment in which torch overrides relu on the CPU; the override returns sevens on a condition.

    Torch imports a module by a name in the environment, just before it registers its overrides.
    """
    (folder / "router.py").write_text(_ROUTER.format(condition=condition))
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"TORCH_PYTHON_NATIVE_USER_GRAPH_ORDER_FN": "router.order", "PYTHONPATH": path}
