"""`opforge warm`: keep a server with torch imported, so that later commands start in a fraction of a second."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opforge.cli.termination import Terminated, raise_on_sigterm
from opforge.errors import OpforgeError

if TYPE_CHECKING:  # it needs what a run needs, and --help does not
    from opforge.sandbox.host.client import ForkServerProcess


def register(app: typer.Typer) -> None:
    app.command("warm", context_settings={"allow_interspersed_args": False})(warm)


def warm(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="Run this command with OPFORGE_SERVER set, then stop the server (default: serve until Ctrl-C)."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda: the runs to serve; others start their own server.")] = "cpu",
    socket: Annotated[str, typer.Option(help="The socket's path (default: in a new temporary folder).")] = "",
) -> int:
    """Keep a server with torch imported, for commands with OPFORGE_SERVER set."""
    if device not in ("cpu", "cuda"):
        raise OpforgeError(f"unknown device {device!r}; allowed: cpu, cuda")
    if command and shutil.which(command[0]) is None:
        raise OpforgeError(f"{command[0]!r} cannot be run: there is no such command")
    from opforge.models.judge import MODEL_ROLES
    from opforge.runs.execute.judge_pool import device_settings
    from opforge.sandbox.host.client import SERVER_VARIABLE
    from opforge.sandbox.host.warm import warm_server

    path = str(Path(socket).absolute()) if socket else ""
    try:
        with raise_on_sigterm(), warm_server(path, MODEL_ROLES, device_settings(device)) as (place, server):
            _check_confinement(server)
            if command:
                return _run(command, {**os.environ, SERVER_VARIABLE: place})
            sys.stdout.write(f"{SERVER_VARIABLE}={place}\n")
            sys.stdout.flush()
            status = server.wait()
            raise OpforgeError(f"the server exited with status {status}; see its errors above")
    except Terminated:
        return 0
    except KeyboardInterrupt:
        if command:
            raise
        return 0


def _check_confinement(server: ForkServerProcess) -> None:
    from opforge.sandbox.host import system_check

    missing = system_check.working_protections(server.spawner)["missing"]
    if needed := [protection for protection in system_check.SHARED_SERVER_PROTECTIONS if protection in missing]:
        raise OpforgeError(
            f"not protected on this system: {', '.join(needed)}; a kernel could corrupt a warm server, so each "
            "command must start its own"
        )


def _run(command: list[str], environment: dict[str, str]) -> int:
    try:
        return subprocess.run(command, env=environment, check=False).returncode
    except OSError as error:
        raise OpforgeError(f"{command[0]!r} cannot be run: {error.strerror}") from None
