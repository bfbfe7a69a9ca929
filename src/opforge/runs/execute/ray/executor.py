"""The executor for a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from opforge.cases import Phase
from opforge.errors import OpforgeError
from opforge.runs.config import RunConfig
from opforge.runs.execute.ray import node
from opforge.runs.execute.ray.connect import check_same_versions, connect, load_ray, start_local, versions
from opforge.runs.execute.ray.placement import KERNELS_PER_GPU, Node, Placement
from opforge.runs.execute.ray.scheduler import Scheduler
from opforge.runs.execute.ray.shipment import blob_digest, blob_pieces
from opforge.runs.executors import Work
from opforge.sandbox.host.client import ForkServerHandle

TASKS = "tasks.jsonl"
"""File in a run's folder that records where and when each task ran."""
_NODE_REPLY_LIMIT_S = 180.0
_SLACK_S = 600.0
_BATCH = 96


class RayCluster:
    """A Ray cluster: the one in use by this process, one joined by address, or a new one. Needs the package ray."""

    default_workers = 100_000
    most_workers = 100_000

    def __init__(
        self, config: RunConfig, _server: ForkServerHandle | None = None, placement: Placement | None = None
    ) -> None:
        self._config = config
        self._ray = load_ray()
        if config.device.startswith("cuda:"):
            raise OpforgeError(
                f"--device {config.device} cannot be combined with --executor ray, which gives each task a GPU; use "
                "--device cuda"
            )
        self._placement = placement or Placement(gpu=config.device == "cuda")
        self._owned = not self._ray.is_initialized()
        if self._owned and config.ray_address:
            connect(self._ray, config.ray_address)
        elif self._owned:
            start_local(self._ray, os.cpu_count() or 1)
        self._settings = node.TaskSettings(config, versions(), "")
        self._descriptions: list[dict[str, Any]] = []
        self._scheduler: Scheduler | None = None

    def device_name(self) -> str:
        """Return the device's name, after checking that all nodes have the right versions.

        The nodes' GPUs must be the same too.
        """
        usable = self._placement.usable(self._nodes())
        if not usable:
            device = "GPU" if self._placement.gpu else "CPU"
            raise OpforgeError(f"the Ray cluster has no node with a {device} to judge on; see `ray status`")
        self._check_versions(usable)
        self._descriptions = self._describe_nodes(usable, confine=self._config.confine, timed=False)
        names = sorted({description["name"] for description in self._descriptions})
        if len(names) > 1 and self._placement.gpu:
            raise OpforgeError(f"the nodes have different GPUs ({', '.join(names)}); a run is on one kind of device")
        return ", ".join(names)

    def overridden_by_torch(self) -> tuple[str, ...]:
        """Return the operators that torch overrides on any node."""
        names = (name for description in self._descriptions for name in description["overridden_by_torch"])
        return tuple(sorted(set(names)))

    def confinement(self) -> dict[str, Any]:
        """Return the confinement that holds on all nodes: that of the node missing the most."""
        confinements = [description["confinement"] for description in self._descriptions]
        return max(confinements, key=lambda held: len(held["missing"]))

    def peaks(self) -> dict[str, Any]:
        """Return the peaks of the first node; each node uses its own when it times."""
        first = self._placement.usable(self._nodes())[:1]
        (description,) = self._describe_nodes(first, confine=False, timed=True)
        peaks: dict[str, Any] = description["peaks"]
        return peaks

    def execute(self, work: Work) -> None:
        """Judge everything, then time everything."""
        config = self._config
        blobs = {
            name: (blob_digest(path), [self._ray.put(piece) for piece in blob_pieces(path)])
            for name, path in work.plan.suite.blobs.items()
        }
        settings = self._ray.put(node.TaskSettings(config, versions(), str(work.folder.resolve()), blobs))
        patience_s = config.timeout_s * (_BATCH + 1) + _SLACK_S
        with (work.folder / TASKS).open("a", encoding="utf-8") as record:
            self._scheduler = Scheduler(
                self._ray, self._placement, config.workers, work.emit, record, patience_s, self._nodes
            )
            for phase in (Phase.CORRECTNESS, Phase.PERFORMANCE):
                self._scheduler.run(work.jobs, phase, settings)

    def close(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._owned:
            self._ray.shutdown()

    def _nodes(self) -> list[Node]:
        return [Node.from_ray(row) for row in self._ray.nodes() if row["Alive"]]

    def _check_versions(self, nodes: Iterable[Node]) -> None:
        """Check the versions of each node.

        The function is sent by value, as a node may not have opforge at all.
        """

        def ask(packages: list[str]) -> dict[str, str | None]:
            import platform
            from importlib import metadata

            installed: dict[str, str | None] = {"python": ".".join(platform.python_version_tuple()[:2])}
            for package in packages:
                try:
                    installed[package] = metadata.version(package)
                except metadata.PackageNotFoundError:
                    installed[package] = None
            return installed

        ours = versions()
        pending = {n: self._remote(n, ask, [p for p in ours if p != "python"]) for n in nodes}
        for queried, theirs in zip(pending, self._await_replies(list(pending.values())), strict=True):
            check_same_versions(ours, theirs, queried.address)

    def _describe_nodes(self, nodes: Iterable[Node], *, confine: bool, timed: bool) -> list[dict[str, Any]]:
        resources = {"num_gpus": 1.0 if timed else 1.0 / KERNELS_PER_GPU} if self._placement.gpu else {}
        pending = [
            self._remote(n, node.describe_node, self._settings, confine=confine, timed=timed, **resources)
            for n in nodes
        ]
        return self._await_replies(pending)

    def _remote(self, target: Node, function: Any, *args: Any, num_gpus: float = 0.0, **kwargs: Any) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(target.id, soft=False)
        options = {"num_cpus": 0, "num_gpus": num_gpus, "scheduling_strategy": strategy}
        return self._ray.remote(**options)(function).remote(*args, **kwargs)

    def _await_replies(self, pending: list[Any]) -> list[dict[str, Any]]:
        try:
            replies: list[dict[str, Any]] = self._ray.get(pending, timeout=_NODE_REPLY_LIMIT_S)
        except self._ray.exceptions.GetTimeoutError:
            raise OpforgeError(
                f"not all nodes of the Ray cluster answered within {_NODE_REPLY_LIMIT_S:.0f} s; are they busy with "
                "other work? See `ray status`"
            ) from None
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, OpforgeError):
                raise error.cause from None
            raise
        return replies
