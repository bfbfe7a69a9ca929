"""Proofs written by hand, beside kernels that need none of a run's time."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import torch

from opforge.backends import BackendOptions
from opforge.backends.directory import DirectoryBackend
from opforge.kernels.proof import proof_path
from opforge.runtime.devices import cpu_name
from opforge.runtime.proof_files import PROOF_FORMAT, sign_proof
from opforge.runtime.signing import load_or_create_key

RELU = "import torch\ndef relu_kernel_impl(self):\n    return torch.where(self > 0, self, 0).to(self.dtype) + MARK\n"
ADD = "import torch\ndef add_kernel_impl(self, other, *, alpha=1):\n    return torch.sub(self, other, alpha=-alpha) + MARK\n"


def marked(tensor):
    return bool((tensor >= 900).any())


def prove(
    root: Path, op: str, operators: dict[str, dict[str, Any]], *, number: int = 1, suffix: str = ".py", **changes: Any
) -> None:
    """Write a proof beside the kernel in a folder of a directory."""
    file = root / op / f"{op}_implementation_{number}{suffix}"
    kernels = DirectoryBackend(BackendOptions(ops_directory=root))._all_kernels()
    (kernel,) = (k for k in kernels if k.file == str(file.resolve()))
    proof = {
        "opforge_proof": PROOF_FORMAT,
        "kernel": kernel.name,
        "digest": kernel.digest,
        "torch": torch.__version__,
        "device": cpu_name(),
        "suites": ["here"],
        "operators": with_extents(operators),
    }
    write(proof_path(file), {**proof, **changes})


def with_extents(operators: dict[str, Any]) -> dict[str, Any]:
    """Return what is proven with any extents that the sizes allow, where a test is not about extents."""
    return {
        op: {
            signature: {"extents": [[[0, row["numel"][1]]] * row["rank"][1]] * len(signature.split(",")), **row}
            for signature, row in rows.items()
        }
        for op, rows in operators.items()
    }


def write(path: Path, proof: dict[str, Any]) -> None:
    """Write a proof, signed as a run does it where there is enough of it to be signed."""
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
        proof = sign_proof(load_or_create_key(), proof)
    path.write_text(json.dumps(proof))


def outcome(call):
    """Return what comes of a call: values, dtypes and strides, or the error."""
    try:
        return described(call())
    except Exception as error:  # noqa: BLE001  # whatever it is
        return type(error), str(error)


def described(value):
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride(), value.storage_offset(), repr(value.tolist())
    return [described(v) for v in value] if isinstance(value, list | tuple) else value
