"""Inspect shared libraries in a separate process before anything loads them.

Reports what they add to torch, and whether loading them kills the process.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opforge import cache
from opforge.errors import OpforgeError
from opforge.procs import linux
from opforge.procs.child import run_command

_LIMIT_S = 180.0
CHILD_COMMAND = (sys.executable, "-P", "-W", "ignore", "-m", "opforge.kernels.native.inspect_child")


@dataclass(frozen=True, slots=True)
class LibraryInspection:
    """The result of loading some libraries together, in order."""

    paths: tuple[Path, ...]
    operators: dict[str, str]
    """The operators they add, such as ``ns::mm``, with their schemas."""
    claimed_namespaces: tuple[str, ...] = ()
    """Of a single library: the namespaces that it claims and does not just extend."""
    error: str = ""
    """Why they cannot be loaded; empty if they can."""
    died: bool = False
    """Whether loading killed the process."""
    output: str = ""
    """The last output of a process that died."""

    @property
    def namespaces(self) -> tuple[str, ...]:
        return tuple(sorted({name.partition("::")[0] for name in self.operators}))


def inspect_libraries(groups: Sequence[Sequence[Path]]) -> list[LibraryInspection]:
    """Return the result of loading each group of libraries, each in a fresh process.

    Torch is imported once for all. Results are cached by the libraries' content, so that a second
    look takes a millisecond.
    """
    missing = next((path for group in groups for path in group if not path.is_file()), None)
    if missing is not None:
        raise OpforgeError(f"there is no library {str(missing)!r}")
    cache_paths = [_cache_path(group) for group in groups]
    rows: list[Any] = [cache.read_json(cache_path) for cache_path in cache_paths]
    unknown = [number for number, row in enumerate(rows) if row is None]
    for number, row in zip(unknown, _inspect_in_child([groups[number] for number in unknown]), strict=True):
        rows[number] = row
        if "operators" in row:  # a failure may be caused by something else that is installed
            cache.write_atomically(cache_paths[number], json.dumps(row))
    return [_inspection(tuple(group), row) for group, row in zip(groups, rows, strict=True)]


def _cache_path(group: Sequence[Path]) -> Path:
    hasher = hashlib.sha256(f"{cache.torch_version()}\n{sys.version}".encode())
    for path in group:
        hasher.update(hashlib.sha256(path.read_bytes()).digest())
    return cache.root() / "native" / "looks" / f"{hasher.hexdigest()[:32]}.json"


def _inspect_in_child(groups: Sequence[Sequence[Path]]) -> list[dict[str, Any]]:
    """Load groups of libraries in a child process."""
    if not groups:
        return []
    paths = [[str(path.resolve()) for path in group] for group in groups]
    label = f"inspecting {paths[0][0]}"
    completed = run_command(CHILD_COMMAND, label=label, limit_s=_LIMIT_S, question=json.dumps(paths))
    rows = [json.loads(line) for line in completed.stdout.splitlines() if line.startswith("{")]
    if len(rows) != len(groups):
        raise OpforgeError(
            f"the process that inspects libraries {linux.describe_returncode(completed.returncode)}: "
            f"{completed.stderr.strip()[-500:]}"
        )
    return rows


def _inspection(paths: tuple[Path, ...], row: dict[str, Any]) -> LibraryInspection:
    if "died" in row:
        output = _last_output(row["said"])
        ending = (
            "loading it "
            f"{'hangs' if row['died'] is None else linux.describe_returncode(row['died']).replace('died', 'dies')}"
        )
        return LibraryInspection(
            paths, {}, error=f"{ending}{f': {output}' if output else ''}", died=True, output=row["said"]
        )
    if "error" in row:
        return LibraryInspection(paths, {}, error=explain_load_error(paths[-1], row["error"]))
    return LibraryInspection(paths, row["operators"], tuple(row.get("whole", ())))


def _last_output(output: str) -> str:
    lines = [
        line.strip()
        for line in output.splitlines()
        if line.strip() and not line.startswith(("frame #", "Exception raised from"))
    ]
    return " / ".join(lines)[-600:]


def explain_load_error(path: Path, error: str) -> str:
    """Explain why a library cannot be loaded.

    It was built for another Python, torch or machine; otherwise the loader's message is returned.
    """
    own_tag = sysconfig.get_config_var("SOABI") or ""
    tag = path.name.split(".", 1)[1].removesuffix(".so") if "." in path.name else ""
    if tag.startswith("cpython-") and tag != own_tag:
        return (
            f"it was built for another Python ({tag}, and this one is {own_tag}); build it again with this Python "
            f"({error[:200]})"
        )
    if (match := re.search(r"undefined symbol: (\S+)", error)) is not None:
        return f"{_missing_symbol(match[1])}; build it again here ({error[:300]})"
    if (match := re.search(r"(\S+\.so[\w.]*): cannot open shared object file", error)) is not None:
        return (
            f"it needs {match[1]}, which is not here; install it, or build the library again with this torch "
            f"({error[:300]})"
        )
    if re.search(r"invalid ELF header|file too short|wrong ELF class|not a dynamic executable", error):
        return f"it is not a shared library for this machine ({error[:300]})"
    return error[:600]


def demangled(name: str) -> str:
    """Return a C++ symbol as it stands in the source; the symbol itself if it is not C++ or cannot be read."""
    try:
        demangle = ctypes.CDLL("libstdc++.so.6")["__cxa_demangle"]
    except (OSError, AttributeError):
        return name
    demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    address = demangle(name.encode(), None, None, ctypes.byref(status))
    if status.value or not address:
        return name
    text = ctypes.string_at(address).decode(errors="replace")
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    free(address)
    return text


def _missing_symbol(symbol: str) -> str:
    name = demangled(symbol)
    if re.match(r"_?Py[A-Z_]", name) or "pybind11" in name:
        return f"it was built for another Python: {name} is not in this one"
    if re.match(r"_ZNK?\w*?(?:3c10|2at|5torch)|aoti_torch|torch_", symbol):
        cuda = "; it needs a torch with CUDA" if "cuda" in name.lower() else ""
        return f"it was built for another torch: {name} is not in this one{cuda}"
    return f"{name} is defined neither in it nor in what it is linked with"
