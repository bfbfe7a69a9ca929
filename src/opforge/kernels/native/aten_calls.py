"""Uses of ATen past its dispatcher, read from a library's file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from opforge.kernels.native.elf import NotALibraryError, symbols
from opforge.ops.stems import stem_of_function

ATEN_FUNCTION = re.compile(rb"_ZN2at(?:3cpu|4cuda|6native)(\d+)(\w+)|aoti_torch_(?:cpu|cuda)_(\w+)")
"""Mangled name of an operator's function, or the name of its shim."""
ATEN_DEFINITION = r"_ZN2at4_ops\d"
_ATEN_FUNCTIONS = r"_ZN2at(?:3cpu|4cuda|6native)\d|aoti_torch_(?:cpu|cuda)_"
_LOOKUP_FUNCTIONS = r"dlv?sym|dlmopen"
_MAX_SEARCHED_BYTES = 256 << 20


def stems_of(operators: Iterable[str]) -> frozenset[str]:
    """Return the stems to look for, of operators such as ``mm.out``."""
    return frozenset(stem_of_function(name.partition(".")[0]) for name in operators)


def rejection_reason(file: Path, stems: frozenset[str]) -> str | None:
    """Report a library's use of operators with these stems, past the dispatcher.

    A library that looks functions up by name is searched for their names in any text.
    """
    try:
        if any(s.defined for s in symbols(file, ATEN_DEFINITION)):
            return f"has loaded {file.name}, which has its own ATen"
        texts = [s.name.encode() for s in symbols(file, _ATEN_FUNCTIONS) if not s.defined]
        looks_up_names = any(not s.defined for s in symbols(file, _LOOKUP_FUNCTIONS))
    except (NotALibraryError, ValueError):
        texts, looks_up_names = [], True
    except OSError:
        return None
    return find_direct_call(file.name, [*texts, *(_mangled_names(file) if looks_up_names else ())], stems)


def find_direct_call(name: str, texts: Iterable[bytes], stems: frozenset[str]) -> str | None:
    """Report the first function name that belongs to an operator with one of these stems."""
    function = next((token for token in _demangled_names(texts) if stem_of_function(token) in stems), None)
    return None if function is None else f"has loaded {name}, which calls ATen's own {function} past the dispatcher"


def _mangled_names(file: Path) -> list[bytes]:
    """Return the names of ATen functions anywhere in a file."""
    with file.open("rb") as handle:
        return [match[0] for match in ATEN_FUNCTION.finditer(handle.read(_MAX_SEARCHED_BYTES))]


def _demangled_names(names: Iterable[bytes]) -> Iterator[str]:
    """Yield the functions in mangled names: ``_ZN2at6native4reluE…`` gives ``relu``."""
    for name in names:
        if (match := ATEN_FUNCTION.match(name)) is not None:
            token = match[3] or match[2][: int(match[1])]
            yield token.decode()
