"""The installed FlagGems package as a backend: the operators of its own list, each with the function that it registers for it."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from opforge import cache
from opforge.backends.base import BackendOptions
from opforge.errors import OpforgeError
from opforge.kernels import Kernel, Served
from opforge.ops import table

_ASK = """
import json, flag_gems
rows = [row[0] for row in flag_gems._FULL_CONFIG if len(row) < 3 or row[2]()]
print(json.dumps([flag_gems.vendor_name, rows]))
"""
_KERNEL = '''"""What FlagGems {version} registers for {op}."""

import multiprocessing
import os
import threading

os.environ.setdefault("GEMS_VENDOR", {vendor!r})  # else it runs a command of every vendor to find out
try:
    multiprocessing.Lock()
except OSError:  # confined: nothing can be shared with other processes, so a lock for this one will do
    multiprocessing.Lock = threading.Lock

import flag_gems

{entry} = {{row[0]: row[1] for row in flag_gems._FULL_CONFIG}}[{row!r}]
'''
_LIMIT_S = 300.0


class FlagGemsBackend:
    """The operators that the installed FlagGems package registers, asked of the package itself. Needs a GPU."""

    name = "flag_gems"

    def __init__(self, options: BackendOptions) -> None:  # noqa: ARG002  # there is nothing to choose
        self.strangers: list[str] = []
        """What FlagGems registers and this torch does not have, in words."""

    def kernels(self, ops: Iterable[str]) -> list[Kernel]:
        wanted = set(ops)
        try:
            release = version("flag_gems")
        except PackageNotFoundError:
            raise OpforgeError(
                "backend 'flag_gems' needs the package flag_gems, which is not installed; pip install 'opforge[flag_gems]'"
            ) from None
        folder = cache.root() / "flag_gems" / release
        found = []
        vendor, rows = _registered()
        for row in rows:
            name = row if "." in row else f"{row}.default"
            if table().get(name) is None:
                self.strangers.append(f"{name} is not an operator of this torch")
            elif name in wanted:
                found.append(_kernel(folder, release, vendor, row, name))
        return found


def _registered() -> tuple[str, list[str]]:
    """Ask FlagGems, in a process of its own, whose device this is and what it registers."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK], capture_output=True, text=True, check=False, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise OpforgeError(f"flag_gems was not imported within {_LIMIT_S:.0f} s") from None
    if done.returncode:
        said = re.findall(r"^\w+(?:Error|Exception)\b.*$", done.stderr, re.MULTILINE) or ["it gives no reason"]
        raise OpforgeError(
            f"flag_gems cannot be imported here ({said[-1].strip()}); it needs a GPU that Triton knows, and a torch built for it"
        )
    vendor, rows = json.loads(done.stdout.strip().splitlines()[-1])
    return vendor, list(dict.fromkeys(rows))


def _kernel(folder: Path, release: str, vendor: str, row: str, name: str) -> Kernel:
    """Write the file that hands out FlagGems' function for an operator, and return it as a kernel."""
    stem = re.sub(r"\W", "_", name)
    entry = f"{stem}_kernel_impl"
    text = _KERNEL.format(version=release, vendor=vendor, op=name, entry=entry, row=row)
    file = folder / f"{stem}.py"
    if not file.is_file() or file.read_text() != text:
        cache.write_atomically(file, text)
    digest = hashlib.sha256(f"{text}{_source_digest()}".encode()).hexdigest()[:16]
    return Kernel(stem, name, (Served(name),), str(file), (entry,), digest, of_file=False)


@functools.cache
def _source_digest() -> str:
    """Return what tells one installation of FlagGems from another: its record of files and their digests."""
    found = importlib.util.find_spec("flag_gems")
    place = Path(found.origin).parent if found is not None and found.origin else None
    records = sorted(place.parent.glob("flag_gems-*.dist-info/RECORD")) if place is not None else []
    return hashlib.sha256(b"".join(r.read_bytes() for r in records)).hexdigest()
