"""The fork server: imports torch once, then makes a fresh process for each kernel in a few milliseconds.

Run as ``python -m opforge.sandbox.server FD role=module:function …``. Each client asks over its own socket. A worker
is reaped only when its client says stop, so a pid that a client holds is never another process's.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import resource
import selectors
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from opforge import processes
from opforge.ops import table
from opforge.sandbox.wire import Channel, ChannelClosedError

Role = Callable[[dict[str, Any], list[int]], None]
_FIRST_MARK = 700_001  # the default limit is 819,200: a mark is always a lowering


@dataclass
class _Client:
    channel: Channel
    workers: dict[int, int] = field(default_factory=dict)
    """Mark by pid."""


class ForkServer:
    """Serves spawn, stop and orphans requests until the first client hangs up."""

    def __init__(self, control: Channel, roles: dict[str, Role]) -> None:
        self._roles = roles
        self._selector = selectors.DefaultSelector()
        self._main = self._add(control)
        self._next_mark = _FIRST_MARK

    def serve(self) -> None:
        self._main.channel.send({"ready": os.getpid()})
        while self._main.channel.fileno() >= 0:
            for key, _events in self._selector.select():
                if key.data.channel.fileno() >= 0:
                    self._answer(key.data)
        self._end_all()

    def _end_all(self) -> None:
        """End every process that was started here, and what those have left."""
        for client in self._clients():
            self._drop(client)
        while strays := processes.children_of(os.getpid()):
            for pid in strays:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)

    def _add(self, channel: Channel) -> _Client:
        client = _Client(channel)
        self._selector.register(channel, selectors.EVENT_READ, client)
        return client

    def _answer(self, client: _Client) -> None:
        try:
            request, fds = client.channel.receive_with_fds()
            match request["do"]:
                case "connect":
                    self._add(Channel.from_fd(fds.pop()))
                    reply: dict[str, Any] = {}
                case "spawn":
                    reply = {"pid": self._spawn(client, request, fds)}
                case "orphans":
                    reply = {"orphans": self._sweep(client.workers[request["pid"]])}
                case "stop":
                    reply = self._stop(client, request["pid"])
                case unknown:
                    raise ValueError(f"unknown request {unknown!r}")
            for fd in fds:
                os.close(fd)
            client.channel.send(reply)
        except ChannelClosedError:
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        """Forget a client that has gone, and end what it started."""
        self._selector.unregister(client.channel)
        client.channel.close()
        for pid in list(client.workers):
            self._stop(client, pid)

    def _spawn(self, client: _Client, request: dict[str, Any], fds: list[int]) -> int:
        mark = self._next_mark
        self._next_mark = _FIRST_MARK + (mark + 1 - _FIRST_MARK) % 100_000
        pid = os.fork()
        if pid == 0:
            self._become(request, fds, mark)
        client.workers[pid] = mark
        return pid

    def _become(self, request: dict[str, Any], fds: list[int], mark: int) -> None:
        """In the child: drop all that is the server's, take on the limits, play the role, end."""
        try:
            processes.die_with_parent()
            os.setsid()
            _keep_only({0, 1, 2, *fds})
            if request.get("output"):
                output = fds.pop()
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.close(output)
            processes.set_mark(mark)
            gc.enable()
            _limit(request.get("limits", {}))
            self._roles[request["role"]](request["config"], fds)
        except ChannelClosedError:
            os._exit(0)
        except BaseException:  # noqa: BLE001  # the border of the process: nothing may climb out of a fork
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(70)
        os._exit(0)

    def _stop(self, client: _Client, pid: int) -> dict[str, Any]:
        mark = client.workers.pop(pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # in the instant between fork and setsid it has no group of its own
        _pid, status = os.waitpid(pid, 0)
        return {"status": status, "orphans": self._sweep(mark)}

    def _sweep(self, mark: int) -> int:
        """End every process that a worker left behind, and its children, and count them."""
        known = {pid for client in self._clients() for pid in client.workers}
        count = 0
        while strays := [
            c for c in processes.children_of(os.getpid()) if c not in known and processes.mark_of(c) in (mark, None)
        ]:
            for pid in strays:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
                count += 1
        return count

    def _clients(self) -> list[_Client]:
        return [key.data for key in self._selector.get_map().values()]


def _keep_only(fds: set[int]) -> None:
    low = 0
    for fd in [*sorted(fds), os.sysconf("SC_OPEN_MAX")]:
        if fd > low:  # an empty range that starts at 0 closes everything
            os.closerange(low, fd)
        low = fd + 1


def _limit(limits: dict[str, int]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if (memory := limits.get("memory_bytes")) is not None:
        total = processes.virtual_bytes() + memory
        resource.setrlimit(resource.RLIMIT_AS, (total, total))


def main() -> None:
    control = Channel.from_fd(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which hangs up
    processes.adopt_orphans()
    gc.disable()  # imports make no garbage worth looking for; children look for theirs
    import torch  # after the socket is open, so that a client sees a failed start as one

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    roles: dict[str, Role] = {}
    for word in sys.argv[2:]:
        name, _, target = word.partition("=")
        module, _, function = target.partition(":")
        roles[name] = getattr(importlib.import_module(module), function)
    table()  # once here instead of once in every child
    for word in sys.argv[2:]:
        getattr(sys.modules[word.partition("=")[2].partition(":")[0]], "prepare", lambda: None)()
    gc.freeze()
    with contextlib.suppress(ChannelClosedError):  # whoever started us gave up before we were ready
        ForkServer(control, roles).serve()


if __name__ == "__main__":
    main()
