"""Run a compiler with a time limit; on failure, report the first error and its place first."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from opforge.errors import OpforgeError
from opforge.procs import linux

COMPILE_LIMIT_S = 600.0
"""Time limit of one compiler run."""
COMPILER_VARIABLES = (
    "CPATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "NVCC_CCBIN",
)
"""Variables that affect a compiler's output."""
_PASSED_VARIABLES = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", *COMPILER_VARIABLES)
_MAX_OUTPUT_BYTES = 1 << 20
_MAX_OUTPUT_LINES = 40
_MAX_OUTPUT_CHARACTERS = 4000
_COMPILER_ERROR = re.compile(
    r"^(?P<file>[^\s:(][^:(\n]*)(?::(?P<line>\d+)(?::(?P<column>\d+))?|\((?P<nvcc>\d+)\)): +(?:fatal +)?error "
    r"*(?:#\S+)?: *(?P<what>.*)$",
    re.MULTILINE,
)
_LINKER_ERROR = re.compile(r"^.*(?:undefined reference|multiple definition|cannot find|ld: ).*$", re.MULTILINE)


class BuildError(OpforgeError):
    """A source that cannot be built.

    The message starts with file, line and error, followed by a limited part of the compiler's
    output.
    """

    exit_code = 1

    def __init__(self, name: str, first_error: str, output: str = "") -> None:
        self.name = name
        self.first_error = first_error
        self.output = _bounded(output)
        super().__init__(f"{name} cannot be built: {first_error}" + (f"\n{self.output}" if self.output else ""))

    @property
    def reason(self) -> str:
        """Return the failure as a verdict's reason, in one line."""
        message = self.first_error.rpartition("error: ")[2]
        details = [line.strip() for line in self.output.splitlines() if line.strip() and message not in line][:6]
        return f"cannot be built: {self.first_error}" + (f" ({' / '.join(details)[:500]})" if details else "")


def run(name: str, command: Sequence[str], folder: Path, limit_s: float) -> None:
    """Run one build command in a folder.

    The error of a failure starts with the compiler's own first error.
    """
    environment = {key: os.environ[key] for key in _PASSED_VARIABLES if key in os.environ}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[3])  # lets our wrapper run in any folder
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**environment, "LC_ALL": "C"},
            )  # fmt: skip
        except OSError as error:
            raise BuildError(name, f"the compiler {command[0]} does not start: {error.strerror}") from None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _end(process)
            raise BuildError(name, f"the compiler did not finish within {limit_s:g} s") from None
        except BaseException:
            _end(process)
            raise
        if code:
            output.seek(0)
            raise error_from_output(name, output.read(_MAX_OUTPUT_BYTES).decode(errors="replace"), code, folder)


def error_from_output(name: str, output: str, code: int, folder: Path) -> BuildError:
    """Return the error found in a compiler's output."""
    output = output.replace(f"{folder}{os.sep}", "")
    if (match := _COMPILER_ERROR.search(output)) is not None:
        location = ":".join(filter(None, (match["file"], match["line"] or match["nvcc"], match["column"])))
        return BuildError(name, f"{location}: error: {match['what']}", output)
    if (match := _LINKER_ERROR.search(output)) is not None:
        return BuildError(name, match[0].strip(), output)
    killed = code < 0 or "Killed signal" in output
    ending = linux.describe_returncode(code)
    return BuildError(name, f"the compiler {ending}" + (", perhaps out of memory" if killed else ""), output)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a compiler with all processes it has started."""
    for pid in [*linux.descendants(process.pid, 100), process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _bounded(output: str) -> str:
    lines = output.strip().splitlines()
    kept = "\n".join(line[:400] for line in lines[:_MAX_OUTPUT_LINES])[:_MAX_OUTPUT_CHARACTERS]
    omitted = len(lines) - len(kept.splitlines())
    return f"{kept}\n… and {omitted} more lines" if omitted > 0 else kept
