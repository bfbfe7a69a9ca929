"""`opforge serve`: judge kernels that clients send over HTTP."""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from opforge.cli.progress import ProgressLine
from opforge.cli.termination import Terminated, raise_on_sigterm
from opforge.errors import OpforgeError, check_range
from opforge.runs.config import DEFAULT_RACE_S, RunConfig

_MAX_PENDING, _MAX_BODY_KIB = 1_000_000, 65_536


def register(app: typer.Typer) -> None:
    app.command("serve")(serve)


def serve(
    data: Annotated[Path, typer.Option(help="Folder for requests, answers and runs.")] = Path("opforge-serve"),
    host: Annotated[
        str, typer.Option(help="Address to listen on; with --tokens, also one that others reach.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for a free one.")] = 8765,
    tokens: Annotated[Path | None, typer.Option(help="File with a client's name and its token in each line.")] = None,
    suite: Annotated[str, typer.Option(help="Suite with the cases of requests that send none.")] = "smoke",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtypes: Annotated[str, typer.Option(help="Dtypes of the suite, such as f32,bf16.")] = "f32,bf16",
    workers: Annotated[int, typer.Option(help="Kernels judged at the same time.")] = 2,
    timeout: Annotated[float, typer.Option(help="Time limit of one case, in seconds.")] = 60.0,
    memory_gib: Annotated[
        float, typer.Option(help="Memory that a kernel's process, and a judge, may use on a CPU.")
    ] = 8.0,
    race_seconds: Annotated[float, typer.Option(help="Seconds of each race between kernel and ATen.")] = DEFAULT_RACE_S,
    max_pending: Annotated[int, typer.Option(help="Most requests of one client that may wait.")] = 1000,
    max_body_kib: Annotated[int, typer.Option(help="Largest request, in KiB.")] = 256,
) -> int:
    """Judge kernels that clients send over HTTP. Accepted requests survive a restart."""
    check_range("--max-pending", max_pending, 1, _MAX_PENDING)
    check_range("--max-body-kib", max_body_kib, 1, _MAX_BODY_KIB)
    check_range("--port", port, 0, 65_535)
    if tokens is None and not _is_this_machine(host):
        raise OpforgeError(
            f"--host {host} can be reached from other machines, so clients need tokens; give a file with --tokens, or "
            "listen on 127.0.0.1"
        )
    try:
        import uvicorn

        from opforge.serve.app import make_app
    except ImportError as error:
        raise OpforgeError(f"opforge serve needs {error.name}; pip install 'opforge[serve]'") from None
    from opforge.serve.kernel_judge import KernelJudge
    from opforge.serve.service import RequestService
    from opforge.serve.tokens import Tokens

    known = Tokens.read(tokens)
    config = RunConfig(
        suite, "directory", device=device, dtypes=tuple(dtypes.split(",")), workers=workers, timeout_s=timeout,
        race_s=race_seconds, memory_gib=memory_gib,
    )  # fmt: skip
    with _listen(host, port) as listener, locked(data), raise_on_sigterm():
        with ProgressLine() as progress:
            judge = KernelJudge(config, data, progress)
        with judge:
            service = RequestService(judge, data, max_pending=max_pending)
            address = listener.getsockname()
            sys.stdout.write(f"serving on http://{address[0]}:{address[1]}, {service.pending} requests left to judge\n")
            sys.stdout.flush()
            app = make_app(service, known, max_bytes=max_body_kib << 10)
            settings = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=2)
            try:
                uvicorn.Server(settings).run(sockets=[listener])
            except (KeyboardInterrupt, Terminated):
                pass
            finally:
                service.close()
    return 0


@contextmanager
def locked(data: Path) -> Iterator[None]:
    """Make the server's folder, and keep other servers out of it."""
    from filelock import FileLock, Timeout

    try:
        data.mkdir(parents=True, exist_ok=True)
        lock = FileLock(data / ".lock")
        lock.acquire(timeout=0)
    except Timeout:
        raise OpforgeError(f"another server uses --data {str(data)!r}; give another folder") from None
    except OSError as error:
        raise OpforgeError(f"--data {str(data)!r} cannot be used: {error.strerror}") from None
    with lock:
        yield


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise OpforgeError(f"cannot listen on {host}:{port}: {error.strerror}; give another --host or --port") from None
    return listener
