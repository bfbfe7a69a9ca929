"""The ahead-of-time side of operators written in C++.

A folder of sources is built as `opforge build` does it, and loaded.
"""

from __future__ import annotations

import re
from pathlib import Path

from opforge.errors import OpforgeError
from opforge.kernels import native
from opforge.kernels.native import sources


def load_sources(folder: Path | str, *, namespace: str = "") -> dict[str, str]:
    """Build the C++ sources of a folder into one library, load it, and return its operators.

    The result maps operators to schemas. ``torch.ops.load_library`` loads the library. An earlier
    build comes from the cache. A namespace or operator that this process already has is detected
    before loading: torch would end the process.
    """
    place = Path(folder).resolve()
    files = tuple(sources.sources_in(place)) if place.is_dir() else ()
    if not files:
        kinds = ", ".join(sources.SOURCE_SUFFIXES)
        raise OpforgeError(f"there is no source ({kinds}) in {str(folder)!r} to build a library from")
    name = re.sub(r"\W", "_", f"{place.parent.name}_{place.name}")
    built = native.build(native.LibrarySpec(name, files, place, namespace))
    before = _is_loaded(built.library)
    operators = native.load(built.library)
    if not operators and not before:
        raise OpforgeError(
            f"{folder} registers no operator; write a block STABLE_TORCH_LIBRARY_FRAGMENT(ns, m) "
            '{ m.def("name(Tensor x) -> Tensor"); }'
        )
    return operators


def _is_loaded(library: Path) -> bool:
    import torch  # the process that loads operators has it

    return str(library.resolve()) in torch.ops.loaded_libraries
