"""Start Ray on this machine, or join a cluster by its address. Errors arrive in bounded time."""

from __future__ import annotations

import importlib
import logging
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from opforge.errors import OpforgeError

_CONNECT_S = 5.0
_ANSWER_S = 30.0
_SETTINGS = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # without it Ray warns about a future change of its own default
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def load_ray() -> Any:
    """Return the ray package; raises an error with install instructions if it is missing."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise OpforgeError(
            f"--executor ray needs the package ray, which cannot be imported ({error}); pip install 'opforge[ray]'"
        ) from None


def start_local(ray: Any, cpus: int) -> None:
    """Start Ray on this machine, for this process only."""
    _initialise(ray, address="local", num_cpus=cpus, include_dashboard=False)


def connect(ray: Any, address: str) -> None:
    """Join a running cluster."""
    if "://" in address:
        raise OpforgeError(
            f"--ray-address {address!r} is not the address of a cluster's head; allowed: auto, or HOST:PORT (the port "
            "that "
            "`ray start --head` names, 6379 unless given)"
        )
    if address != "auto":
        _answers(address)
    _initialise(ray, address=address)


def _initialise(ray: Any, **options: Any) -> None:
    address = options["address"]
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, configure_logging=True, **options)
    except ConnectionError as error:
        raise OpforgeError(f"no Ray cluster was found at --ray-address {address}: {_first_line(error)}") from None
    except (RuntimeError, ValueError) as error:
        remedy = "; install the same on all machines of the cluster" if "Version mismatch" in str(error) else ""
        raise OpforgeError(f"Ray cannot be used at {address!r}: {' '.join(str(error).split())}{remedy}") from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray has replaced our handler
    _silence_stdout(ray)


def _silence_stdout(ray: Any) -> None:
    """Silence Ray's messages about lost workers on stdout: the run's own record has them."""
    worker: Any = getattr(getattr(ray, "_private", None), "worker", None)
    if worker is not None and hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_data, **_options: None


def _answers(address: str) -> None:
    """Raise an error unless a Ray head answers at an address.

    Ray itself tries for minutes and then ends the process.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise OpforgeError(f"--ray-address {address!r} is not auto or HOST:PORT, for example 10.0.0.1:6379")
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except OSError as error:
        raise OpforgeError(
            f"nothing answers at --ray-address {address} ({error.strerror or error}); check that the cluster is up, "
            "and that "
            "the port is the one of its head (6379 unless given to `ray start --head`)"
        ) from None
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "health-check",
        "--skip-version-check",
        "--address",
        address,
    ]
    try:
        completed = subprocess.run(
            command, capture_output=True, check=False, timeout=_ANSWER_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        completed = None
    if completed is None or completed.returncode:
        raise OpforgeError(
            f"the server at --ray-address {address} is not the head of a Ray cluster (no answer within "
            f"{_ANSWER_S:.0f} s); "
            "use the port that `ray start --head` prints"
        )


def versions() -> dict[str, str | None]:
    """Return the versions that must be the same wherever kernels of one run are judged."""
    installed: dict[str, str | None] = {"python": ".".join(platform.python_version_tuple()[:2])}
    for package in ("opforge", "torch", "ray"):
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            installed[package] = None
    return installed


def check_same_versions(ours: Mapping[str, str | None], theirs: Mapping[str, str | None], node: str) -> None:
    """Raise an error if a node's versions differ from ours."""
    for name, our_version in ours.items():
        if theirs.get(name) != our_version:
            their_version = theirs.get(name) or "none"
            raise OpforgeError(
                f"node {node} has {name} {their_version}, and here it is {our_version}; install the same on all "
                "machines of the cluster"
            )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["it does not say why"])[0]
