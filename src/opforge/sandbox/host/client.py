"""Start the fork server from the trusted side, and request processes from it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from opforge.errors import InternalError
from opforge.procs import linux
from opforge.procs.channel import Channel, ChannelClosedError
from opforge.sandbox.guard.secret_names import looks_secret
from opforge.sandbox.host import folders

_START_LIMIT_S = 120.0
_REPLY_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended, and how many processes it left behind."""

    status: int
    orphans: int


class Spawner:
    """A connection to the fork server. One request at a time."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    @classmethod
    def from_fd(cls, fd: int) -> Spawner:
        return cls(Channel.from_fd(fd))

    def spawn(
        self, role: str, config: Mapping[str, Any], fds: Iterable[int], *, limits: Mapping[str, int], output: bool
    ) -> int:
        """Fork a process in a role and return its pid.

        With ``output`` the last descriptor becomes its stdout and stderr.
        """
        request = {"do": "spawn", "role": role, "config": config, "limits": limits, "output": output}
        return int(self._ask(request, fds)["pid"])

    def kill_orphans(self, pid: int) -> int:
        """Kill the processes that a living worker has orphaned, and count them."""
        return int(self._ask({"do": "orphans", "pid": pid})["orphans"])

    def stop(self, pid: int) -> Exit:
        """Kill a process and its group; return how it ended (by itself, if it had already)."""
        reply = self._ask({"do": "stop", "pid": pid})
        return Exit(reply["status"], reply["orphans"])

    def folder(self) -> str:
        """Return a new folder for this client's workers; the server removes it with the client."""
        return str(self._ask({"do": "folder"})["folder"])

    def load_native_runtime(self) -> str:
        """Have the native runtime in all processes forked from now on; return why there is none, or nothing."""
        return str(self._ask({"do": "native"})["problem"])

    def connect(self, gpu: str = "") -> socket.socket:
        """Return our end of a new connection to the server, to be passed to another process.

        With ``gpu``, processes started through it see only that GPU.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._ask({"do": "connect", "gpu": gpu}, [theirs.fileno()])
        theirs.close()
        return ours

    def close(self) -> None:
        self._channel.close()

    def _ask(self, request: Mapping[str, Any], fds: Iterable[int] = ()) -> Any:
        self._channel.send(request, fds)
        reply = self._channel.receive(_REPLY_LIMIT_S)
        if "error" in reply:
            raise InternalError(reply["error"])
        return reply


class ForkServerHandle(Protocol):
    """A fork server as runs use it: their own, or a warm one shared by many."""

    @property
    def spawner(self) -> Spawner:
        """Return the connection to the server."""

    def close(self) -> None:
        """Hang up; the server ends everything that it started for us."""


class ForkServerProcess:
    """The fork server, for the process that starts it. Starting does not wait; ``spawner`` does."""

    def __init__(
        self, roles: Mapping[str, str], environment: Mapping[str, str], listener: socket.socket | None = None
    ) -> None:
        """Start the server; it accepts other commands as clients on ``listener``."""
        ours, theirs = Channel.pair()
        role_arguments = [f"{name}={target}" for name, target in roles.items()]
        fds = [theirs.fileno(), *([] if listener is None else [listener.fileno()])]
        numbers = [str(fds[0]), str(fds[1] if len(fds) > 1 else -1)]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "opforge.sandbox.host.fork_server", *numbers, *role_arguments],
            pass_fds=fds,
            env=server_environment(environment),
            stdin=subprocess.DEVNULL,
            stdout=2,  # stdout is for a command's results, and libraries in our children write there
        )
        theirs.close()
        self._channel = ours
        self._spawner: Spawner | None = None
        self._folders_root = ""

    @property
    def spawner(self) -> Spawner:
        """Return the connection to the server, waiting until it has imported torch."""
        if self._spawner is None:
            try:
                self._folders_root = str(self._channel.receive(_START_LIMIT_S)["folders"])
            except (ChannelClosedError, TimeoutError) as error:
                status = self._process.poll()
                raise InternalError(f"the fork server did not start (status {status}); see its errors above") from error
            self._spawner = Spawner(self._channel)
        return self._spawner

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> int:
        """Wait until the server ends by itself, and return its status."""
        return self._process.wait()

    def close(self) -> None:
        """Hang up; the server ends everything that it started, then itself."""
        self._channel.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._folders_root:
            folders.remove(self._folders_root)  # if the server was killed before it could


_KEPT_VARIABLES = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "USER",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "CC",
    "CXX",
    "XDG_CACHE_HOME",
)
SERVER_VARIABLE = "OPFORGE_SERVER"
"""Path of a warm server's socket; kernels do not see this variable."""
_KEPT_PREFIXES = ("OPFORGE_", "CUDA_", "NVIDIA_", "TRITON_", "TORCH_", "PYTHON", "HELION_")


def worker_environment() -> dict[str, str]:
    """Return the environment of kernels: no keys or tokens, one thread, our package importable."""
    kept = {
        name: value
        for name, value in linux.environment_without_kernels().items()
        if (name in _KEPT_VARIABLES or name.startswith(_KEPT_PREFIXES))
        and name != SERVER_VARIABLE
        and not looks_secret(name)
    }
    package = str(Path(__file__).resolve().parents[3])
    path = [package, *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]
    kept.setdefault("USER", "kernel")  # libraries ask for a name even if the user has none
    fixed = {
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # fixed, so that earlier frees of a process do not decide
        "MALLOC_TRIM_THRESHOLD_": str(16 << 30),  # whether results of a timed call cause page faults
    }
    return {**kept, **fixed, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path))}


def server_environment(device_settings: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a fork server for a kind of device."""
    return {**worker_environment(), **device_settings}
