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
    folder: Annotated[Path, typer.Argument(help="The folder of a run, or one with runs in it.")],
    host: Annotated[
        str, typer.Option(help="Another address to listen on; requests there need the printed token.")
    ] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="The port, 0 for any free one (default: 8484, or any).")] = None,
) -> int:
    """Serve the page of a run or a list of runs; it updates while a run is in progress. Press Ctrl-C to stop."""
    from opforge.reports.page.view_server import ViewServer

    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.default_int_handler)
    with ViewServer(folder, host, port) as server:
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        sys.stderr.write("press Ctrl-C to stop\n")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0
