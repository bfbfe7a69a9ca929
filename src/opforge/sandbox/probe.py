"""A child of the fork server that says what devices there are; asking in the server itself would spoil later forks."""

from __future__ import annotations

from typing import Any

from opforge.errors import OpforgeError
from opforge.sandbox.client import Spawner
from opforge.sandbox.wire import Channel

_LIMIT_S = 60.0


def serve(config: dict[str, Any], fds: list[int]) -> None:
    """Answer once."""
    import torch  # the process that checks has none

    del config
    Channel.from_fd(fds[0]).send({"cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0})


def check_device(spawner: Spawner, device: str) -> None:
    """Raise an error when the machine does not have a device that a run asks for."""
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return
    ours, theirs = Channel.pair()
    pid = spawner.spawn("probe", {}, [theirs.fileno()], limits={}, output=False)
    theirs.close()
    count = ours.receive(_LIMIT_S)[kind]
    ours.close()
    spawner.stop(pid)
    if count <= int(index or 0):
        found = f"it has {count}" if count else "torch sees none on this machine"
        raise OpforgeError(f"device {device!r} is not there: {found}; use --device cpu, or a torch built for your GPU")
