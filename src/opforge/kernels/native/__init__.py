"""C++ and CUDA kernels: built into shared libraries, and test-loaded in a child process first."""

from opforge.kernels.native.building import BuildError, Built, Unit, build
from opforge.kernels.native.clashes import Clash, ClashError, clashes_of_libraries, clashes_of_sources, load
from opforge.kernels.native.looking import Look, look
from opforge.kernels.native.sources import SUFFIXES, headers_in, is_native

__all__ = [
    "SUFFIXES", "BuildError", "Built", "Clash", "ClashError", "Look", "Unit", "build", "clashes_of_libraries", "clashes_of_sources",
    "headers_in", "is_native", "load", "look",
]  # fmt: skip
