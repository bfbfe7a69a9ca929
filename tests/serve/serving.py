"""Servers for tests: `opforge serve` in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CASE, OTHER = "((T([64, 33], f32),), {})", "((T([5], f32),), {})"
RELU = "import torch\ndef relu_kernel_impl(self):\n    return torch.where(self <= 0, 0, self)\n"
WRONG = RELU.replace("<= 0", "<= 0.5")


class Server:
    """A running server and its address."""

    def __init__(self, data: Path, *words: str) -> None:
        command = [sys.executable, "-m", "opforge.cli", "serve", "--data", str(data), "--port", "0", *words]
        self._errors = (data.parent / f"{data.name}.stderr").open("a+")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=os.environ)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.fullmatch(r"serving on (http://127.0.0.1:\d+), (\d+) requests left to judge\n", line)
        assert found, (line, self.stderr())
        self.url, self.left = found[1], int(found[2])

    def stderr(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self._errors.close()


@contextmanager
def serving(data: Path, *words: str) -> Iterator[Server]:
    """Start a server, and kill it at the end if it still runs."""
    server = Server(data, *words)
    try:
        yield server
    finally:
        server.close()
