"""`opforge view`: look at runs in a browser."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("view")(view)


def view(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, or one that holds runs.")],
    host: Annotated[
        str, typer.Option(help="Another address to listen on; whoever comes there must bring a token that is printed.")
    ] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="The port, 0 for any that is free [default: 8484, or any].")] = None,
) -> int:
    """Serve the page of a run, or a list of runs, on this machine; it shows what comes while a run goes on. Ctrl-C ends it."""
    from opforge.reports.page.server import Viewer

    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.default_int_handler)
    with Viewer(folder, host, port) as server:
        sys.stdout.write(f"{server.address}\n")
        sys.stdout.flush()
        sys.stderr.write("Ctrl-C ends it\n")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0
