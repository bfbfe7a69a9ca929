"""Layouts of torch with which the native runtime works, by version."""

from __future__ import annotations

import re

import torch

KNOWN_LAYOUTS = {
    "2.11": (184, 96, 16, 40, 104, 120, 112, 51, 138, 47),
    "2.12": (184, 96, 16, 40, 104, 120, 112, 51, 138, 47),
    "2.13": (176, 96, 16, 40, 104, 120, 112, 50, 137, 47),
    "2.14": (176, 96, 16, 40, 104, 120, 112, 50, 137, 48),
    "2.15": (176, 96, 16, 40, 104, 120, 112, 50, 137, 48),
}
"""Numbers of ``kLayout`` in runtime.cpp, computed from the headers of each version's wheel."""
_CUDA_KEY = 7
"""Index of the number of the dispatch key CUDA, which torch tells."""
_PUBLISHED = re.compile(r"(\d+\.\d+)\.\d+(\+(cpu|cu\d+|rocm[\d.]+|xpu))?", re.ASCII)


def verified_minor() -> str:
    """Return the version of the running torch, such as 2.13, if its layout is known for sure; else nothing.

    It is not for development versions, builds by others, debug builds and builds with another C++ ABI: these may
    differ from the torch that PyTorch published under the same number.
    """
    version = _PUBLISHED.fullmatch(torch.__version__)
    usual = torch._C._GLIBCXX_USE_CXX11_ABI and not torch.version.debug  # noqa: SLF001  # no public name
    return version[1] if version is not None and version[1] in KNOWN_LAYOUTS and usual else ""


def fits(layout: tuple[int, ...]) -> bool:
    """Whether a library with this layout fits the running torch."""
    if layout[_CUDA_KEY : _CUDA_KEY + 1] != (int(torch._C.DispatchKey.CUDA),):  # noqa: SLF001
        return False
    own = KNOWN_LAYOUTS.get(verified_minor())
    return layout in KNOWN_LAYOUTS.values() if own is None else layout == own
