"""Judge a model with the kernels of a backend, from a process that does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from opforge import registry
from opforge.errors import InternalError, NothingToJudgeError, OpforgeError
from opforge.kernels import Kernel, native
from opforge.kernels.native.builder import unconfined
from opforge.models.job import ModelJob, ModelKernel, ModelSpec
from opforge.models.target import find_model
from opforge.ops import table
from opforge.procs.channel import Channel, ChannelClosedError
from opforge.runs.config import RunConfig
from opforge.runs.execute.build_native import library_of
from opforge.runs.execute.judge_pool import ROLES, start_server
from opforge.sandbox.guard.confined_command import confined_command
from opforge.sandbox.host import system_check
from opforge.sandbox.host.client import ForkServerHandle
from opforge.traces.targets import Settings

MODEL_ROLES = {
    **ROLES,
    "model": "opforge.models.model_worker:serve",
    "model_judge": "opforge.models.judge_process:serve",
}

StatusCallback = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The settings of `opforge model`."""

    target: str
    """``FILE.py``, ``module:function``, or an architecture such as ``hf:BertModel``."""
    run_config: RunConfig
    """Backend, device and limits, as for a run."""
    dtype: str = ""
    """A short name; empty for the model's own."""
    train: bool = False
    seed: int = 0
    settings: Settings = field(default_factory=Settings)
    """The size of an architecture."""


def judge_model(config: ModelConfig, on_status: StatusCallback = lambda _what: None) -> dict[str, Any]:
    """Return the report on a model with a backend's kernels installed."""
    run = config.run_config.checked()
    target = find_model(config.target, config.settings)
    backend = registry.load("backends", run.backend)(run.backend_options)
    kernels = _installable(backend.kernels(_operator_names(run)), run)
    server = start_server(run.device, MODEL_ROLES, confined=run.confine)
    try:
        if run.device != "cpu":
            system_check.check_device(server.spawner, run.device)
        model_kernels = [_built(kernel, run, on_status) for kernel in kernels]
        confinement = system_check.working_protections(server.spawner) if run.confine else system_check.no_protections()
        job = ModelJob(
            ModelSpec(target, config.dtype, config.train, config.seed),
            model_kernels,
            run.device,
            run.timeout_s,
            run.memory_bytes,
            confined=run.confine,
            protected=not confinement["missing"],
            allow_fallback=run.allow_fallback,
        )
        report = _run_judge(server, job, on_status)
    finally:
        server.close()
    if unusable := report.get("unusable"):
        raise OpforgeError(f"{config.target} cannot be run, even without kernels: {unusable}")
    skipped = list(getattr(backend, "skipped", ()))
    head = {
        "model": config.target,
        "backend": run.backend,
        "device": run.device,
        "train": config.train,
        "seed": config.seed,
    }
    return {**head, **report, "remarks": skipped, "confinement": confinement}


def _operator_names(run: RunConfig) -> list[str]:
    return [op.name for op in (table().select(run.ops) if run.ops else table())]


def _installable(kernels: list[Kernel], run: RunConfig) -> list[Kernel]:
    usable = [kernel for kernel in kernels if kernel.file is not None and kernel.reference is None]
    if not usable:
        for_ops = f" for {', '.join(run.ops)}" if run.ops else ""
        raise NothingToJudgeError(
            f"backend {run.backend!r} has no kernels{for_ops} to put in ATen's place; use --backend directory with "
            "--ops-directory"
        )
    names = [kernel.name for kernel in usable]
    return [k if names.count(k.name) == 1 else replace(k, name=f"{k.name} ({k.primary})") for k in usable]


def _built(kernel: Kernel, run: RunConfig, on_status: StatusCallback) -> ModelKernel:
    """Return a kernel for the judge process; C++ and CUDA are built first."""
    if native.is_native(str(kernel.file)):
        on_status(f"building {kernel.name}")
        library, broken = library_of(Path(str(kernel.file)), confined_command if run.confine else unconfined)
        kernel = replace(kernel, library=library, broken=broken)
    return ModelKernel.of(kernel)


def _run_judge(server: ForkServerHandle, job: ModelJob, on_status: StatusCallback) -> dict[str, Any]:
    """Run the judge process and return its report."""
    ours, theirs = Channel.pair()
    line = server.spawner.connect()
    pid = server.spawner.spawn(
        "model_judge", {"job": job.wire()}, [theirs.fileno(), line.fileno()], limits={}, output=False
    )
    theirs.close()
    line.close()
    try:
        while True:
            message = ours.receive()
            if "report" in message:
                report: dict[str, Any] = message["report"]
                return report
            on_status(str(message["doing"]))
    except ChannelClosedError:
        raise InternalError("the process that judges the model died; see its errors above") from None
    finally:
        ours.close()
        server.spawner.stop(pid)
