"""Children of the fork server that report its devices and its working protections.

Asking in the server itself would spoil later forks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from opforge.errors import OpforgeError
from opforge.procs.channel import Channel
from opforge.runtime.devices import cpu_name
from opforge.sandbox.guard import readable_paths
from opforge.sandbox.guard.confinement import Confinement, abilities
from opforge.sandbox.host import folders
from opforge.sandbox.host.client import Spawner

SHARED_SERVER_PROTECTIONS = ("network", "other processes")
"""Protections without which a kernel could connect or attach to a server that others use too."""
_LIMIT_S = 60.0
_BUILD_LIMIT_S = 1200.0


def prepare() -> None:
    """Look in the server for what torch overrides, once for all runs that use it."""
    _overridden_by_torch("cpu")


def serve(config: dict[str, Any], fds: list[int]) -> None:
    """Answer one request."""
    if "confinement" in config:
        Channel.from_fd(fds[0]).send(_test_protections(config["confinement"]["folder"]))
        return
    if "native" in config:
        Channel.from_fd(fds[0]).send({"problem": _build_native_runtime()})
        return
    if "overridden" in config:
        Channel.from_fd(fds[0]).send({"overridden": _overridden_by_torch(config["overridden"].partition(":")[0])})
        return
    import torch  # not above: the process that calls check_device has no torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    Channel.from_fd(fds[0]).send({"cuda": [torch.cuda.get_device_name(i) for i in range(count)]})


def check_device(spawner: Spawner, device: str) -> str:
    """Return the name of the device that a run asks for; raise an error if the machine lacks it."""
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return cpu_name()
    names = gpu_names(spawner)
    count = len(names)
    if count <= int(index or 0):
        available = f"it has {count}" if count else "torch sees none on this machine"
        raise OpforgeError(
            f"there is no device {device!r}: {available}; use --device cpu, or a torch built for your GPU"
        )
    return names[int(index or 0)]


def gpu_names(spawner: Spawner) -> list[str]:
    """Return the names of the GPUs that torch sees on this machine."""
    names: list[str] = _ask(spawner, {})["cuda"]
    return names


def load_native_runtime(spawner: Spawner) -> None:
    """Have the native runtime in all processes forked from now on; raise OpforgeError if there is none.

    A child builds it if need be: the server may have other clients, who would wait.
    """
    problem = "OPFORGE_NATIVE=0 switches the native runtime off; unset it"
    if os.environ.get("OPFORGE_NATIVE") != "0":
        problem = _ask(spawner, {"native": True}, _BUILD_LIMIT_S)["problem"] or spawner.load_native_runtime()
    if problem:
        raise OpforgeError(f"--runtime native: {problem}; or judge with --runtime python")


def overridden_by_torch(spawner: Spawner, device: str) -> tuple[str, ...]:
    """Return the operators that torch itself overrides from Python on a device, where kernels are judged."""
    return tuple(_ask(spawner, {"overridden": device})["overridden"])


def working_protections(spawner: Spawner) -> dict[str, Any]:
    """Return the protections that work on this system, as tested by a confined process."""
    folder = folders.make_client_folder(spawner.folder())
    try:
        held: dict[str, Any] = _ask(spawner, {"confinement": asdict(Confinement(folder))})
        return held
    finally:
        folders.remove(folder)


def no_protections() -> dict[str, Any]:
    """Return the manifest's entry for a run without confinement."""
    return {"landlock": None, "seccomp": False, "own_user": False, "held": [], "missing": list(_PROTECTION_TESTS)}


def _ask(spawner: Spawner, config: dict[str, Any], limit_s: float = _LIMIT_S) -> Any:
    ours, theirs = Channel.pair()
    pid = spawner.spawn("probe", config, [theirs.fileno()], limits={}, output=False)
    theirs.close()
    reply = ours.receive(limit_s)
    ours.close()
    spawner.stop(pid)
    return reply


@functools.cache
def _overridden_by_torch(device_type: str) -> list[str]:
    from opforge.runtime.aten_kernels import dispatch_key  # they import torch
    from opforge.runtime.loading import aten_operators
    from opforge.runtime.torch_native import overridden_by_torch

    return overridden_by_torch(dispatch_key(device_type), aten_operators())


def _build_native_runtime() -> str:
    """Build the native runtime unless it is cached; return why that is impossible, or nothing."""
    from opforge.runtime.native.building import NativeError, build  # they import torch

    try:
        build()
    except NativeError as error:
        return str(error)
    return ""


def _test_protections(folder: str) -> dict[str, Any]:
    can = abilities()
    held = [protection for protection, trial in _PROTECTION_TESTS.items() if trial(folder)]
    return {
        "landlock": can.landlock or None,
        "seccomp": can.seccomp,
        "own_user": can.first_user is not None,
        "held": held,
        "missing": [protection for protection in _PROTECTION_TESTS if protection not in held],
    }


def _refused(action: Callable[[], object]) -> bool:
    try:
        action()
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _files(folder: str) -> bool:
    outside = f"{os.path.dirname(folder)}/written-by-a-probe"

    def write() -> None:
        os.close(os.open(outside, os.O_CREAT | os.O_WRONLY, 0o600))
        os.remove(outside)

    inside = f"{folder}/written"
    with contextlib.suppress(OSError):
        os.close(os.open(inside, os.O_CREAT | os.O_WRONLY, 0o600))
    homes = filter(os.path.isdir, readable_paths.home_folders())
    shut = all(_refused(functools.partial(os.listdir, home)) for home in homes)
    return bool(abilities().landlock) and shut and _refused(write) and os.path.exists(inside)


def _network(_folder: str) -> bool:
    return all(_refused(functools.partial(socket.socket, family)) for family in (socket.AF_INET, socket.AF_INET6))


def _other_processes(_folder: str) -> bool:
    above = os.getppid()

    def read() -> None:
        os.close(os.open(f"/proc/{above}/environ", os.O_RDONLY))

    return _refused(read) and _refused(
        lambda: os.kill(above, signal.SIGURG)
    )  # harmless to a process that does not wait for it


def _system_calls(_folder: str) -> bool:
    return abilities().seccomp


_PROTECTION_TESTS: dict[str, Callable[[str], bool]] = {
    "files outside its folder": _files,
    "network": _network,
    "other processes": _other_processes,
    "system calls of administration": _system_calls,
}
