"""The installed FlagGems package as a backend: the functions in its own list of operators."""

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
from opforge.kernels import Kernel, ServedOperator
from opforge.ops import table

_REPLY_PREFIX = "opforge: "
"""Prefix of the reply line; the package may print other lines, even when the process exits."""
_QUERY_SCRIPT = """
import json, sys
import flag_gems

def is_autograd(key):
    if isinstance(key, (list, tuple, set, frozenset)):
        return bool(key) and all(map(is_autograd, key))
    # AutogradCUDA, DispatchKey.AutogradCUDA; in old releases Autograd.enable or Autograd.disable
    words = str(key).split(".")
    return words[-1].startswith("Autograd") or words[-2:] == ["Autograd", "enable"]

def is_kernel(row):
    condition = row[2] if len(row) > 2 else None
    if callable(condition):
        condition = bool(condition())
    return condition is not False and not any(map(is_autograd, (condition, *row[3:])))

found = {}
try:
    vendor = str(flag_gems.vendor_name)
    for index, row in enumerate(flag_gems._FULL_CONFIG):
        if not isinstance(row, (tuple, list)) or len(row) < 2 or not isinstance(row[0], str) or not callable(row[1]):
            raise TypeError(f"row {index} is {row!r}, and not an operator's name with a function")
        if is_kernel(row):
            found.setdefault(row[0], index)  # a second one is not registered: torch refuses it
    answer = {"vendor": vendor, "rows": found}
except Exception as error:  # of the package's own conditions, which may raise anything
    answer = {"error": f"{type(error).__name__}: {error}"}
sys.stdout.write("\\n" + ANSWER + json.dumps(answer) + "\\n")
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

{entry} = flag_gems._FULL_CONFIG[{index}][1]  # the row of {row} that holds here
'''
_LIMIT_S = 300.0


class FlagGemsBackend:
    """The operators that the installed FlagGems package registers, asked of the package itself. Needs a GPU."""

    name = "flag_gems"

    def __init__(self, options: BackendOptions) -> None:  # noqa: ARG002  # there are no options
        self.skipped: list[str] = []
        """Messages about operators that FlagGems registers and this torch lacks."""

    def kernels(self, ops: Iterable[str]) -> list[Kernel]:
        wanted = set(ops)
        try:
            release = version("flag_gems")
        except PackageNotFoundError:
            raise OpforgeError(
                "backend 'flag_gems' needs the package flag_gems, which is not installed; "
                "pip install 'opforge[flag_gems]'"
            ) from None
        folder = cache.root() / "flag_gems" / release
        kernels = []
        vendor, rows = _registered()
        for row, index in rows.items():
            name = row if "." in row else f"{row}.default"
            if table().get(name) is None:
                self.skipped.append(f"{name} is not an operator of this torch")
            elif name in wanted:
                kernels.append(_kernel(folder, release, vendor, row, index, name))
        return kernels


def _registered() -> tuple[str, dict[str, int]]:
    """Query FlagGems in a separate process: the device's vendor, and row indices by operator.

    Rows with an unmet condition and rows for an Autograd key are left out. If several rows have the
    same name, the first is used, as FlagGems does.
    """
    try:
        process = subprocess.run(
            [sys.executable, "-c", f"ANSWER = {_REPLY_PREFIX!r}\n{_QUERY_SCRIPT}"],
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise OpforgeError(f"flag_gems was not imported within {_LIMIT_S:.0f} s") from None
    replies = [
        line.removeprefix(_REPLY_PREFIX) for line in process.stdout.splitlines() if line.startswith(_REPLY_PREFIX)
    ]
    if not replies:
        errors = re.findall(r"^\w+(?:Error|Exception)\b.*$", process.stderr, re.MULTILINE) or ["it gives no reason"]
        raise OpforgeError(
            f"flag_gems cannot be imported here ({errors[-1].strip()}); "
            "it needs a GPU that Triton supports, and a torch built for it"
        )
    reply = json.loads(replies[-1])
    if "error" in reply:
        raise OpforgeError(
            "flag_gems was imported, but its list of operators, flag_gems._FULL_CONFIG, "
            f"cannot be read ({reply['error']}); "
            "expected rows of operator name, function and condition, as in FlagGems 5.0"
        )
    return reply["vendor"], reply["rows"]


def _kernel(folder: Path, release: str, vendor: str, row: str, index: int, name: str) -> Kernel:
    """Write a file that exports FlagGems' function for an operator, and return it as a kernel."""
    stem = re.sub(r"\W", "_", name)
    entry = f"{stem}_kernel_impl"
    text = _KERNEL.format(version=release, vendor=vendor, op=name, entry=entry, row=row, index=index)
    file = folder / f"{stem}.py"
    if not file.is_file() or file.read_text() != text:
        cache.write_atomically(file, text)
    digest = hashlib.sha256(f"{text}{_source_digest()}".encode()).hexdigest()
    return Kernel(stem, name, (ServedOperator(name),), str(file), (entry,), digest, is_file_digest=False)


@functools.cache
def _source_digest() -> str:
    """Return a digest of the sources of the installed FlagGems."""
    spec = importlib.util.find_spec("flag_gems")
    digest = hashlib.sha256()
    if spec is not None and spec.origin:
        folder = Path(spec.origin).parent
        for file in sorted(folder.rglob("*.py")):
            digest.update(str(file.relative_to(folder)).encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
