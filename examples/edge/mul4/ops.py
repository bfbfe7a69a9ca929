"""my_ops::mul4, registered by the C++ library that is built from aot/."""

from pathlib import Path

from opforge.edge.build_definitions import load_sources

OPERATORS = load_sources(Path(__file__).parent / "aot")
