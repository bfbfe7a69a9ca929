"""`opforge mcp`: tools for coding agents, over the Model Context Protocol."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from opforge.cli.serve import locked
from opforge.errors import OpforgeError, check_range
from opforge.runs.config import DEFAULT_RACE_S, RunConfig
from opforge.suites.lookup import find_suite


def register(app: typer.Typer) -> None:
    app.command("mcp")(mcp)


def mcp(
    data: Annotated[Path, typer.Option(help="Folder for judged kernels and their runs.")] = Path("opforge-mcp"),
    http: Annotated[
        int | None, typer.Option(help="Listen on this port of 127.0.0.1 instead of standard input and output.")
    ] = None,
    suite: Annotated[str, typer.Option(help="Suite with the cases of kernels that are judged without any.")] = "smoke",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtypes: Annotated[str, typer.Option(help="Dtypes of the suite, such as f32,bf16.")] = "f32,bf16",
    workers: Annotated[int, typer.Option(help="Kernels judged at the same time.")] = 2,
    timeout: Annotated[float, typer.Option(help="Time limit of one case, in seconds.")] = 60.0,
    race_seconds: Annotated[float, typer.Option(help="Seconds of each race between kernel and ATen.")] = DEFAULT_RACE_S,
) -> int:
    """Give coding agents tools that judge, time and explain kernels (Model Context Protocol)."""
    if http is not None:
        check_range("--http", http, 1, 65_535)
    try:
        from opforge.serve.agent_tools import AgentTools, make_server
    except ImportError as error:
        raise OpforgeError(f"opforge mcp needs {error.name}; pip install 'opforge[mcp]'") from None
    from opforge.serve.kernel_judge import KernelJudge
    from opforge.serve.service import RequestService

    config = RunConfig(
        suite, "directory", device=device, dtypes=tuple(dtypes.split(",")), workers=workers, timeout_s=timeout,
        race_s=race_seconds,
    ).checked()  # fmt: skip
    find_suite(config.suite)  # now: the judge starts while the agent may already ask

    def start() -> RequestService:
        judge = KernelJudge(config, data)
        try:
            return RequestService(judge, data, max_pending=1000)
        except BaseException:
            judge.close()
            raise

    with locked(data):
        tools = AgentTools(start)
        try:
            if http is None:
                make_server(tools).run("stdio")
            else:
                sys.stderr.write(f"tools on http://127.0.0.1:{http}/mcp\n")
                make_server(tools).run("streamable-http", host="127.0.0.1", port=http)
        except KeyboardInterrupt:
            pass
        finally:
            tools.close()
    return 0
