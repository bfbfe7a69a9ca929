"""The settings of a run, stored in its manifest and read back from it."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from opforge import registry
from opforge.backends.base import BackendOptions
from opforge.errors import MAX_TIMEOUT_S, MIN_TIMEOUT_S, OpforgeError, check_range
from opforge.suites.base import DEFAULT_DTYPES
from opforge.suites.case_selection import CaseSelection
from opforge.suites.lookup import names_a_file

MIN_RACE_S, DEFAULT_RACE_S, MAX_RACE_S = 0.1, 1.0, 600.0
MAX_MEMORY_GIB = 65_536
MAX_SPEEDUP_THRESHOLD = 1000
RUNTIMES = {
    "python": "each kernel's function is called",
    "native": "each kernel is installed at its operator, as `opforge.enable` does, and the operator is called",
}


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The settings of a run."""

    suite: str
    backend: str
    ops: tuple[str, ...] = ()
    """As typed; empty for all."""
    device: str = "cpu"
    dtypes: tuple[str, ...] = DEFAULT_DTYPES
    ops_directory: str = "generated_kernels"
    implementations: dict[str, str] = field(default_factory=dict)
    custom_ops_root: str = "custom_ops"
    p: float = 1.0
    """The speedup threshold of perf@p."""
    timeout_s: float = 60.0
    race_s: float = DEFAULT_RACE_S
    """Seconds of each race between kernel and ATen."""
    memory_gib: float = 8.0
    workers: int = 2
    allow_fallback: bool = False
    """Whether a kernel may call the operator that it replaces."""
    confine: bool = True
    """Whether kernels are kept from network, files and other processes."""
    runtime: str = "python"
    """How kernels are called; a key of ``RUNTIMES``."""
    executor: str = "local"
    ray_address: str = ""
    """Address of a running cluster; empty to start Ray on this machine."""
    topn: int | None = None
    sample: int | None = None
    profile: str | None = None
    max_mib: float | None = None
    """The last four fields are those of ``Choice``."""
    generation: dict[str, Any] = field(default_factory=dict)
    """Generation settings, for a backend that makes kernels; see `opforge.generate.options`."""

    def checked(self) -> RunConfig:
        """Return the settings with absolute paths; raises if one is out of range."""
        check_range("--timeout", self.timeout_s, MIN_TIMEOUT_S, MAX_TIMEOUT_S)
        check_range("--memory-gib", self.memory_gib, 0.25, MAX_MEMORY_GIB)
        check_range("--p", self.p, 0, MAX_SPEEDUP_THRESHOLD)
        check_range("--race-seconds", self.race_s, MIN_RACE_S, MAX_RACE_S)
        check_range("--workers", self.workers, 1, registry.load("executors", self.executor).most_workers)
        if self.ray_address and self.executor == "local":
            raise OpforgeError(f"--ray-address {self.ray_address} requires --executor ray")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise OpforgeError(f"unknown device {self.device!r}; allowed: cpu, cuda, cuda:N")
        if self.runtime not in RUNTIMES:
            raise OpforgeError(f"unknown --runtime {self.runtime!r}; allowed: {', '.join(RUNTIMES)}")
        self.selection.checked()
        return replace(
            self,
            suite=str(Path(self.suite).resolve()) if names_a_file(self.suite) else self.suite,
            ops_directory=str(Path(self.ops_directory).resolve()),
            custom_ops_root=str(Path(self.custom_ops_root).resolve()),
        )

    @property
    def selection(self) -> CaseSelection:
        return CaseSelection(self.topn, self.sample, self.profile, self.max_mib)

    @property
    def backend_options(self) -> BackendOptions:
        return BackendOptions(
            Path(self.ops_directory), self.implementations, Path(self.custom_ops_root), self.generation
        )

    @property
    def memory_bytes(self) -> int | None:
        """Return the memory limit of a kernel's process.

        There is none with a GPU: its driver maps more than the memory that exists.
        """
        return int(self.memory_gib * (1 << 30)) if self.device == "cpu" else None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> RunConfig:
        row = {**row, "ops": tuple(row["ops"]), "dtypes": tuple(row["dtypes"])}
        return cls(**row)
