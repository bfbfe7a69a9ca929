"""C++ and CUDA sources as kernels: built into shared libraries, and looked at in a child process before anything loads them."""

from opforge.kernels.native.build import Built, BuildError, Unit, build
from opforge.kernels.native.clashes import Clash, check, clashes_of_sources
from opforge.kernels.native.looking import Look, look
from opforge.kernels.native.sources import SUFFIXES, digest, is_native

__all__ = [
    "SUFFIXES", "BuildError", "Built", "Clash", "Look", "Unit", "build", "check", "clashes_of_sources", "digest", "is_native", "look",
]  # fmt: skip
