"""``python -m BackendBench.scripts.create_simple_test_ops``: five kernels, to try a directory of kernels.

BackendBench's call the operator that they replace, which opforge's judge calls cheating; these compute with numpy.
"""

import sys
from pathlib import Path

_KERNEL = '''"""{op}, by numpy."""

import numpy as np
import torch


def {entry}({parameters}):
    if not {first}.is_floating_point() or {first}.dtype == torch.bfloat16:
        raise NotImplementedError("only floating-point numbers that numpy has")
    return torch.as_tensor({body}, dtype={first}.dtype, device={first}.device)


if __name__ == "__main__":
    print({entry}({example}))
'''
_X = "input.cpu().numpy()"
_OPS = {
    "relu.default": ("input", f"np.where({_X} <= 0, 0, {_X})", "torch.tensor([-1.0, 0.0, 2.0])"),
    "add.Tensor": ("input, other, *, alpha=1", f"{_X} + alpha * np.asarray(other)", "torch.ones(3), torch.ones(3)"),
    "mul.Tensor": ("input, other", f"{_X} * np.asarray(other)", "torch.ones(3), torch.arange(3.0)"),
    "abs.default": ("input", f"np.abs({_X})", "torch.tensor([-1.0, 2.0])"),
    "sum.default": ("input, *, dtype=None", f"{_X}.sum(dtype=np.float64)", "torch.ones(2, 3)"),
}


def create_simple_test_ops(base_dir: str | Path = "generated_kernels") -> list[Path]:
    """Write a kernel for relu, add, mul, abs and sum; return the files."""
    files = []
    for op, (parameters, body, example) in _OPS.items():
        name = op.replace(".", "__")
        file = Path(base_dir) / name / f"{name}_implementation_v1.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        fields = {"op": op, "parameters": parameters, "body": body, "example": example, "first": "input"}
        file.write_text(_KERNEL.format(entry=f"{name}_kernel_impl", **fields), encoding="utf-8")
        files.append(file)
    return files


if __name__ == "__main__":
    for path in create_simple_test_ops():
        sys.stdout.write(f"made {path}\n")
