"""Run the command line: in this process, or in one of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from opforge.cli.main import call
from tests.conftest import ROOT


def opforge(*words: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in this process, with its output in files as it would be in a pipe."""
    return in_this_process(call, *words, cwd=cwd, **environment)


def in_this_process(
    main: Callable[[list[str]], int], *words: str, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Call a function that is given the words of a command and returns its exit code."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with _at(cwd), _with(environment), _redirected(1, out), _redirected(2, err), _argv(words):
            code = main(list(words))
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), err.read())


def opforge_process(
    *words: str, cwd: Path = ROOT, timeout: float = 600, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "opforge.cli", *words],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=timeout,
        env={**os.environ, **environment},
        check=False,
    )


@contextlib.contextmanager
def _at(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _with(environment: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _argv(words: tuple[str, ...]) -> Iterator[None]:
    before = sys.argv
    sys.argv = ["opforge", *words]
    try:
        yield
    finally:
        sys.argv = before


@contextlib.contextmanager
def _redirected(fd: int, file: IO[str]) -> Iterator[None]:
    """Send what Python and child processes write to a standard stream into a file."""
    name = {1: "stdout", 2: "stderr"}[fd]
    stream, kept = getattr(sys, name), os.dup(fd)
    stream.flush()
    os.dup2(file.fileno(), fd)
    with os.fdopen(os.dup(fd), "w", buffering=1) as redirected:
        setattr(sys, name, redirected)
        try:
            yield
        finally:
            setattr(sys, name, stream)
            os.dup2(kept, fd)
            os.close(kept)
