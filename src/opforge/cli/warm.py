"""`opforge warm`: keep a server with torch imported, so that later commands start in a fraction of a second."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opforge.cli.ending import Terminated, heeding_termination
from opforge.errors import OpforgeError

if TYPE_CHECKING:  # it needs what a run needs, and --help does not
    from opforge.sandbox.client import ForkServerProcess

_NEEDED = ("network", "other processes")
"""What kernels must be kept from: they could connect to the server, or attach to it, and spoil later runs."""


def register(app: typer.Typer) -> None:
    app.command("warm", context_settings={"allow_interspersed_args": False})(warm)


def warm(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="Run this command with OPFORGE_SERVER set, then end the server [default: serve until Ctrl-C]."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda: which runs it serves; others start their own.")] = "cpu",
    socket: Annotated[str, typer.Option(help="The socket's path [default: in a new temporary folder].")] = "",
) -> int:
    """Keep a server with torch imported for the commands that OPFORGE_SERVER leads to it."""
    if device not in ("cpu", "cuda"):
        raise OpforgeError(f"unknown device {device!r}; allowed: cpu, cuda")
    if command and shutil.which(command[0]) is None:
        raise OpforgeError(f"{command[0]!r} cannot be run: there is no such command")
    from opforge.models.conduct import MODEL_ROLES
    from opforge.runs.execute import device_settings
    from opforge.sandbox.client import SERVER_VARIABLE
    from opforge.sandbox.warm import listening

    path = str(Path(socket).absolute()) if socket else ""
    try:
        with heeding_termination(), listening(path, MODEL_ROLES, device_settings(device)) as (place, server):
            _check_confinement(server)
            if command:
                return _run(command, {**os.environ, SERVER_VARIABLE: place})
            sys.stdout.write(f"{SERVER_VARIABLE}={place}\n")
            sys.stdout.flush()
            status = server.wait()
            raise OpforgeError(f"the server has ended by itself (status {status}); its errors stand above")
    except Terminated:
        return 0
    except KeyboardInterrupt:
        if command:
            raise
        return 0


def _check_confinement(server: ForkServerProcess) -> None:
    from opforge.sandbox import probe

    missing = probe.confinement(server.spawner)["missing"]
    if leaks := [what for what in _NEEDED if what in missing]:
        raise OpforgeError(
            f"this system cannot keep kernels from: {', '.join(leaks)}; a kernel could spoil a warm server for later runs, so each command must start its own"
        )


def _run(command: list[str], environment: dict[str, str]) -> int:
    try:
        return subprocess.run(command, env=environment, check=False).returncode
    except OSError as error:
        raise OpforgeError(f"{command[0]!r} cannot be run: {error.strerror}") from None
