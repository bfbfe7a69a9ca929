"""C++ and CUDA kernels: built into shared libraries, and test-loaded in a child process first."""

from opforge.kernels.native.builder import BuildError, BuiltLibrary, LibrarySpec, build
from opforge.kernels.native.clashes import Clash, ClashError, clashes_of_libraries, clashes_of_sources, load
from opforge.kernels.native.inspect import LibraryInspection, inspect_libraries
from opforge.kernels.native.sources import SUFFIXES, headers_in, is_native

__all__ = [
    "SUFFIXES",
    "BuildError",
    "BuiltLibrary",
    "Clash",
    "ClashError",
    "LibraryInspection",
    "LibrarySpec",
    "build",
    "clashes_of_libraries",
    "clashes_of_sources",
    "headers_in",
    "inspect_libraries",
    "is_native",
    "load",
]  # fmt: skip
