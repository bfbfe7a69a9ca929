"""The fork server: imports torch once, then forks a new process for each kernel in milliseconds.

Run as ``python -m opforge.sandbox.host.fork_server FD LISTENER role=module:function …``. Each client has its
own socket. A worker is reaped only when its client says stop, so its pid is not reused before.
LISTENER is -1, or a listening socket on which other commands of the same user and version may
become clients (`opforge warm`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import resource
import secrets
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from opforge.errors import OpforgeError
from opforge.ops import table
from opforge.procs import linux
from opforge.procs.channel import Channel, ChannelClosedError
from opforge.sandbox.guard import confinement
from opforge.sandbox.host import folders
from opforge.sandbox.host.admission import ClientCommand, Hello, OtherDeviceError, Version, admit

Role = Callable[[dict[str, Any], list[int]], None]
_USERS = 100_000
_FORK_PATIENCE_S = 5.0
_TASK_RECOUNT_INTERVAL_S = 5.0
_SWEEP_ROUNDS_BEFORE_USER_KILL = 3
_HELLO_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class _ForkedWorker:
    mark: int
    user: int | None
    """Unix user reserved for this worker, if root."""


@dataclass
class _Client:
    channel: Channel
    workers: dict[int, _ForkedWorker] = field(default_factory=dict)
    """Workers by pid."""
    folder: str | None = None
    gpu: str = ""
    """The only GPU that its workers see."""
    command: ClientCommand | None = None
    """The command that came by the listener; workers get its environment, folder and stderr."""

    def close(self) -> None:
        self.channel.close()
        if self.command is not None:
            os.close(self.command.stderr)


class ForkServer:
    """Serves spawn, stop and orphans requests until the first client hangs up."""

    def __init__(self, control: Channel, roles: dict[str, Role], listener: socket.socket | None = None) -> None:
        self._roles = roles
        self._selector = selectors.DefaultSelector()
        self._main = self._add(_Client(control))
        self._listener = listener
        self._version = Version.here()
        if listener is not None:
            self._selector.register(listener, selectors.EVENT_READ)
        self._next_user = secrets.randbelow(_USERS)  # servers on one machine should use different users
        self._tasks = _TaskLimit()
        self._folders_root = folders.make_server_folder()

    def serve(self) -> None:
        try:
            self._main.channel.send({"ready": os.getpid(), "folders": self._folders_root})
            while self._main.channel.fileno() >= 0:
                for key, _events in self._selector.select():
                    if key.data is None:
                        self._admit()
                    elif key.data.channel.fileno() >= 0:
                        self._answer(key.data)
        finally:
            self._kill_all()
            folders.remove(self._folders_root)

    def _kill_all(self) -> None:
        """Kill every process started here, and what those left behind."""
        for client in self._clients():
            self._drop(client)
        while strays := linux.children_of(os.getpid()):
            for pid in strays:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)

    def _add(self, client: _Client) -> _Client:
        self._selector.register(client.channel, selectors.EVENT_READ, client)
        return client

    def _admit(self) -> None:
        """Make a command that connects to the listener a client, if its user and version match."""
        assert self._listener is not None  # noqa: S101  # only a listener's event leads here
        connection, _address = self._listener.accept()
        channel, fds = Channel(connection), list[int]()
        try:
            message, fds = channel.receive_with_fds(_HELLO_LIMIT_S)
            command = admit(connection, Hello.from_wire(message), fds, self._version)
            channel.send({"ready": os.getpid(), "folders": self._folders_root}, timeout_s=_HELLO_LIMIT_S)
        except OpforgeError as error:
            with contextlib.suppress(OSError):
                refusal = {"refused": str(error), "other_device": isinstance(error, OtherDeviceError)}
                channel.send(refusal, timeout_s=_HELLO_LIMIT_S)
        except (OSError, ValueError, TypeError, KeyError):
            pass  # not an opforge command, or one that has ended: nobody to answer
        else:
            self._add(_Client(channel, command=command))
            return
        channel.close()
        for fd in fds:
            os.close(fd)

    def _answer(self, client: _Client) -> None:
        try:
            request, fds = client.channel.receive_with_fds()
            reply = self._handle_request(client, request, fds)
            for fd in fds:
                os.close(fd)
            client.channel.send(reply)
        except ChannelClosedError:
            self._drop(client)
        except (ValueError, KeyError, TypeError, OSError):
            if client.command is None:
                raise  # the server belongs to one run, and the request is from its own code
            traceback.print_exc()
            self._drop(client)  # other runs go on

    def _handle_request(self, client: _Client, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        match request["do"]:
            case "connect":
                command = client.command and replace(client.command, stderr=os.dup(client.command.stderr))
                self._add(_Client(Channel.from_fd(fds.pop()), gpu=request["gpu"], command=command))
                return {}
            case "spawn":
                return self._spawn(client, request, fds)
            case "folder":
                client.folder = client.folder or folders.make_client_folder(self._folders_root)
                return {"folder": client.folder}
            case "orphans":
                return {"orphans": self._kill_strays(client.workers[request["pid"]])}
            case "native":
                return {"problem": _load_native_runtime()}
            case "stop":
                return self._stop(client, request["pid"])
            case unknown:
                raise ValueError(f"unknown request {unknown!r}")

    def _drop(self, client: _Client) -> None:
        """Remove a disconnected client and stop its workers."""
        self._selector.unregister(client.channel)
        client.close()
        for pid in list(client.workers):
            self._stop(client, pid)
        if client.folder is not None:
            folders.remove(client.folder)

    def _spawn(self, client: _Client, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        self._next_user = (self._next_user + 1) % _USERS
        request["config"].setdefault("gpu", client.gpu)
        confinement_wire = request["config"].get("confinement")
        tasks = self._tasks.count() if confinement_wire else None
        user = confinement.user_for(confinement_wire["folder"], self._next_user) if confinement_wire else None
        worker = _ForkedWorker(linux.new_mark(), user)
        try:
            pid = _fork()
        except OSError as error:
            return {"error": f"not enough memory for another process ({error.strerror}); use fewer --workers"}
        if pid == 0:
            self._run_child(request, fds, worker, tasks, client.command)
        client.workers[pid] = worker
        return {"pid": pid}

    def _run_child(
        self,
        request: dict[str, Any],
        fds: list[int],
        worker: _ForkedWorker,
        tasks: int | None,
        command: ClientCommand | None,
    ) -> None:
        """Turn the child into a worker: close server files, set limits, confine, run the role."""
        try:
            linux.die_with_parent()
            os.setsid()
            if command is not None:
                _adopt_settings(command)
            if gpu := request["config"]["gpu"]:
                os.environ["CUDA_VISIBLE_DEVICES"] = gpu
            confinement_wire = request["config"].get("confinement")
            if request["config"].get("memory"):
                fds.insert(0, os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC))  # before it is confined
            _keep_only({0, 1, 2, *fds, *(confinement.shared_rules().handles if confinement_wire else ())})
            if request.get("output"):
                output = fds.pop()
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.close(output)
            linux.set_mark(worker.mark)
            gc.enable()
            _limit(request.get("limits", {}))
            if confinement_wire:
                confinement.enter(confinement.confinement_from_wire(confinement_wire), worker.user, tasks)
            self._roles[request["role"]](request["config"], fds)
        except ChannelClosedError:
            os._exit(0)
        except BaseException:  # noqa: BLE001  # nothing may escape from a forked child
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(70)
        os._exit(0)

    def _stop(self, client: _Client, pid: int) -> dict[str, Any]:
        worker = client.workers.pop(pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # between fork and setsid it has no group of its own
        _pid, status = os.waitpid(pid, 0)
        return {"status": status, "orphans": self._kill_strays(worker)}

    def _kill_strays(self, worker: _ForkedWorker) -> int:
        """Kill the processes that a worker left behind, and their children; return the count."""
        known = {pid for client in self._clients() for pid in client.workers}
        count = rounds = 0
        while strays := [
            c for c in linux.children_of(os.getpid()) if c not in known and linux.mark_of(c) in (worker.mark, None)
        ]:
            for pid in strays:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
                count += 1
            rounds += 1
            if rounds >= _SWEEP_ROUNDS_BEFORE_USER_KILL and worker.user is not None and not self._is_alive(worker):
                _kill_user_processes(worker.user)  # they fork faster than we kill them
        return count

    def _is_alive(self, worker: _ForkedWorker) -> bool:
        return any(worker is known for client in self._clients() for known in client.workers.values())

    def _clients(self) -> list[_Client]:
        return [key.data for key in self._selector.get_map().values() if key.data is not None]


class _TaskLimit:
    """The limit on this user's processes and threads, recounted every few seconds.

    None where it does not limit workers: as root, or where forking fails under it.
    """

    def __init__(self) -> None:
        self._counted_at = -_TASK_RECOUNT_INTERVAL_S
        self._count: int | None = None
        self._counts = True

    def count(self) -> int | None:
        now = time.monotonic()
        if self._counts and os.getuid() != 0 and now - self._counted_at > _TASK_RECOUNT_INTERVAL_S:
            self._counted_at = now
            self._count = linux.count_tasks(os.getuid()) + confinement.MAX_SHARED_PROCESSES
            if not _can_fork_with(self._count):
                self._counts, self._count = False, None  # the user has processes in containers, unseen by us
        return self._count


def _adopt_settings(command: ClientCommand) -> None:
    """Adopt the environment, working folder and stderr of the command that asked for it."""
    os.environ.clear()
    os.environ.update(command.environment)
    tempfile.tempdir = None  # may be cached from the server
    os.chdir(command.folder)
    os.dup2(command.stderr, 1)
    os.dup2(command.stderr, 2)


def _can_fork_with(max_tasks: int) -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            linux.limit_tasks(max_tasks)
            if os.fork() == 0:
                os._exit(0)
            os.wait()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def _fork() -> int:
    """Fork; at the process limit, retry for a while, since workers come and go."""
    until = time.monotonic() + _FORK_PATIENCE_S
    while True:
        try:
            return os.fork()
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def _kill_user_processes(user: int) -> None:
    """Kill all processes of a worker's reserved user with one signal: none can fork meanwhile."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            linux.become_user(user, (), None)
            os.kill(-1, signal.SIGKILL)
        os._exit(0)
    os.waitpid(pid, 0)


def _keep_only(fds: set[int]) -> None:
    low = 0
    for fd in [*sorted(fds), os.sysconf("SC_OPEN_MAX")]:
        if fd > low:  # an empty range that starts at 0 closes everything
            os.closerange(low, fd)
        low = fd + 1


def _load_native_runtime() -> str:
    """Load the native runtime for all processes forked from now on; return why that is impossible, or nothing."""
    from opforge.runtime.native import binding  # with torch, which is imported after the socket is open
    from opforge.runtime.native.building import NativeError

    try:
        binding.load()
    except NativeError as error:
        return str(error)
    return ""


def _limit(limits: dict[str, int]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if (memory := limits.get("memory_bytes")) is not None:
        total = linux.virtual_bytes() + memory
        resource.setrlimit(resource.RLIMIT_AS, (total, total))


def main() -> None:
    control = Channel.from_fd(int(sys.argv[1]))
    listener = None if (fd := int(sys.argv[2])) < 0 else socket.socket(fileno=fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which hangs up
    linux.adopt_orphans()
    gc.disable()  # imports create little garbage; children enable it again
    import torch  # after the socket is open, so that a client sees a failed start as one

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    roles: dict[str, Role] = {}
    role_arguments = sys.argv[3:]
    for argument in role_arguments:
        name, _, target = argument.partition("=")
        module, _, function = target.partition(":")
        roles[name] = getattr(importlib.import_module(module), function)
    table()  # once here instead of once in every child
    for argument in role_arguments:
        getattr(sys.modules[argument.partition("=")[2].partition(":")[0]], "prepare", lambda: None)()
    confinement.shared_rules()
    gc.freeze()
    with contextlib.suppress(ChannelClosedError):  # the parent gave up before we were ready
        ForkServer(control, roles, listener).serve()


if __name__ == "__main__":
    main()
