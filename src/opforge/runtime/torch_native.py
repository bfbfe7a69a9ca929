"""Operators that torch itself overrides from Python: ``torch._native``, in torch 2.12 and newer.

ATen's kernel of such an operator is then behind a router in Python. What opforge saves as the
original, passes calls on to, and times kernels against is the router.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

import torch

from .operator_schema import dispatcher_name

ADVICE = (
    "torch.backends.python_native.disable_operations(…) switches this off, if it is called before kernels are enabled; "
    "so does TORCH_DISABLE_NATIVE_JIT=1 in the environment for overrides that compile kernels"
)


def overridden_by_torch(key: str, names: Iterable[str]) -> list[str]:
    """Return those operators that torch overrides from Python for a dispatch key.

    The dispatcher knows the source file of each registration, also of those below another one.
    """
    if "torch._native" not in sys.modules:
        return []
    router = re.compile(rf"^{key}(?: \(inactive\))?: registered at \S*/torch/_native/", re.MULTILINE)
    dump = torch._C._dispatch_dump  # noqa: SLF001  # torch has no public one
    return [name for name in names if router.search(dump(f"aten::{dispatcher_name(name)}"))]
