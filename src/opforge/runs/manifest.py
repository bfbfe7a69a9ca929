"""The manifest of a run: settings, versions, machine and plan; scores once it has finished."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine and the device of a run."""

    platform: str = ""
    processor: str = ""
    device: str = ""
    name: str = ""
    """The vendor's name of the device."""
    overridden_by_torch: tuple[str, ...] = ()
    """Operators that torch overrides from Python there: kernels are compared with that, not with ATen alone."""

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> Machine:
        return cls(**_known(cls, fields) | {"overridden_by_torch": tuple(fields.get("overridden_by_torch", ()))})


@dataclass(frozen=True, slots=True)
class Activity:
    """How the judges spent their time since the run was last started, in seconds summed over all of them."""

    judging_s: float = 0.0
    timing_s: float = 0.0
    waiting_s: float = 0.0
    """For the device, or for others that time."""
    gpu_busy: float | None = None
    """Share of the time in which the GPU did something; None if that is not known."""

    def __str__(self) -> str:
        shares = (("judging", self.judging_s), ("timing", self.timing_s), ("waiting", self.waiting_s))
        times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in shares if seconds >= 0.05)
        return (times or "none") + ("" if self.gpu_busy is None else f"; GPU busy {self.gpu_busy:.0%} of the time")


@dataclass(frozen=True, slots=True)
class PlannedKernel:
    """A kernel that is judged, with its operators."""

    name: str
    primary: str = ""
    file: str | None = None
    digest: str = ""
    ops: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    """Suspicious parts of its source."""
    reference: str | None = None
    """The name of its reference; None for an operator of ATen."""

    def wire(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "reference" or value is not None}

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> PlannedKernel:
        lists = {name: tuple(fields.get(name, ())) for name in ("ops", "hints")}
        return cls(**_known(cls, fields) | lists)


@dataclass(frozen=True, slots=True)
class WeakOperators:
    """Operators whose cases let mutants of ATen pass, with those mutants."""

    origin: str = ""
    """Where and when that was measured."""
    ops: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """The plan of a run; a field that is None is missing in manifests of older runs."""

    suite: str | None
    suite_digest: str | None
    cases: int
    operators: int
    """Number of operators to judge, including those without a kernel."""
    missing: tuple[str, ...]
    """Operators without a kernel."""
    optional: tuple[str, ...]
    """Operators that a kernel may decline."""
    performance: tuple[str, ...] | None
    """Operators, or kernels, to be timed."""
    kernels: tuple[PlannedKernel, ...]
    sources: dict[str, str]
    """Digests of the files that cases and references come from."""
    losses: tuple[str, ...]
    remarks: tuple[str, ...]
    weak: WeakOperators

    def wire(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        fields |= {"kernels": [kernel.wire() for kernel in self.kernels], "weak": asdict(self.weak)}
        return {name: value for name, value in fields.items() if value is not None}

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> PlanRecord:
        """Return a plan; raises KeyError without the fields that all versions write."""
        return cls(
            suite=fields.get("suite"),
            suite_digest=fields.get("suite_digest"),
            cases=fields.get("cases", 0),
            operators=fields["operators"],
            missing=tuple(fields["missing"]),
            optional=tuple(fields["optional"]),
            performance=tuple(fields["performance"]) if "performance" in fields else None,
            kernels=tuple(map(PlannedKernel.from_wire, fields.get("kernels", ()))),
            sources=fields.get("sources", {}),
            losses=tuple(fields.get("losses", ())),
            remarks=tuple(fields.get("remarks", ())),
            weak=WeakOperators(**_known(WeakOperators, fields.get("weak", {}))),
        )


@dataclass(frozen=True, slots=True)
class ProofsRecord:
    """The proofs that a run wrote."""

    written: tuple[str, ...] = ()
    remarks: dict[str, str] = field(default_factory=dict)
    """Why a kernel's proof was not written, by kernel."""
    failed: str = ""
    """Why none was written; older runs have one reason for all."""

    def wire(self) -> dict[str, Any]:
        return {"written": self.written, "remarks": self.remarks} | ({"failed": self.failed} if self.failed else {})

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> ProofsRecord:
        return cls(tuple(fields.get("written", ())), fields.get("remarks", {}), fields.get("failed", ""))


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about a run but its verdicts."""

    config: dict[str, Any]
    """As `RunConfig` writes it; older runs have fewer settings."""
    plan: PlanRecord
    command: tuple[str, ...] = ()
    versions: dict[str, str | None] = field(default_factory=dict)
    machine: Machine = Machine()
    started: str = ""
    confinement: dict[str, Any] | None = None
    """The protections that hold where kernels run; None until they are probed."""
    peaks: dict[str, Any] | None = None
    """The measured peaks of the device; None if nothing is timed."""
    finished: str | None = None
    scores: dict[str, Any] | None = None
    proofs: ProofsRecord | None = None
    activity: Activity | None = None
    """None where it was not recorded: on a cluster, and in older runs."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields of newer versions."""

    def wire(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "opforge": 1,
            "command": self.command,
            "config": self.config,
            "versions": self.versions,
            "machine": asdict(self.machine),
            "started": self.started,
            "plan": self.plan.wire(),
        }
        if self.confinement is not None:
            fields |= {"confinement": self.confinement, "peaks": self.peaks}
        if self.finished is not None:
            fields["finished"] = self.finished
        if self.scores is not None:
            fields["scores"] = self.scores
        if self.proofs is not None:
            fields["proofs"] = self.proofs.wire()
        if self.activity is not None:
            fields["activity"] = asdict(self.activity)
        return fields | self.extra

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> Manifest:
        """Return a manifest; raises KeyError without the fields that all versions write."""
        proofs, activity = fields.get("proofs"), fields.get("activity")
        return cls(
            config=fields["config"],
            plan=PlanRecord.from_wire(fields["plan"]),
            command=tuple(fields.get("command", ())),
            versions=fields.get("versions", {}),
            machine=Machine.from_wire(fields.get("machine", {})),
            started=fields.get("started", ""),
            confinement=fields.get("confinement"),
            peaks=fields.get("peaks"),
            finished=fields.get("finished"),
            scores=fields.get("scores"),
            proofs=None if proofs is None else ProofsRecord.from_wire(proofs),
            activity=None if activity is None else Activity(**_known(Activity, activity)),
            extra={name: value for name, value in fields.items() if name not in _FIELDS},
        )

    @property
    def backend(self) -> str:
        return str(self.config["backend"])

    @property
    def suite(self) -> str:
        """Return the suite as it was asked for: a name or a file."""
        return str(self.config["suite"])

    @property
    def suite_name(self) -> str:
        return self.suite if self.plan.suite is None else self.plan.suite

    @property
    def device(self) -> str:
        return str(self.config["device"])

    @property
    def missing_protections(self) -> list[str]:
        """Return the protections that do not hold; raises if they were not probed."""
        if self.confinement is None:
            raise ValueError("the protections of this run are not known")
        missing: list[str] = self.confinement["missing"]
        return missing


_FIELDS = frozenset({"opforge", *Manifest.__slots__} - {"extra"})


def _known(record: type, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that this version knows."""
    names: tuple[str, ...] = record.__slots__  # type: ignore[attr-defined]
    return {name: fields[name] for name in names if name in fields}
