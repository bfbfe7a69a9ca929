"""Install kernels in place of ATen's in this process, count their calls, and remove them."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from . import proof_files, signing, untrusted_files
from .adapters import adapt
from .aten_kernels import dispatch_key
from .compile_warning import watch_compilation
from .devices import device_name
from .dispatch import INSTALL_LOCK, InstalledKernel, KernelWarning, OperatorSlot, PythonSlot
from .learning import DEVICE_TYPES, LEARN, LEARNER
from .loading import Function, LazyFunction, LoadError, aten_operators, load_function
from .native import binding
from .native.binding import NativeLibrary
from .native.building import NativeError
from .native_slots import NativeSlot
from .operator_names import select_operators
from .operator_schema import FUNCTIONAL, OUT, OperatorSchema, schema_of
from .plan_files import PlanFile, read_plan_file, write_plan_file
from .proven_calls import ProvenCalls
from .results import ResultCheck
from .saved_plans import PlanCollection, SavedPlans, origin_here
from .torch_native import ADVICE, overridden_by_torch

SIGNERS_VARIABLE = "OPFORGE_SIGNERS"
"""Environment variable with the trusted signers. Without it, all signers are trusted."""
NATIVE_VARIABLE = "OPFORGE_NATIVE"
"""Environment variable that is 0 if calls shall go through Python and not through the native runtime."""
POLICIES = {
    "proven": "calls for which a kernel is proven right, at sizes where it was timed and is not slower",
    "right": "calls for which a kernel is proven right, at any speed",
    "all": "every call that the kernel does not decline",
}


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel's file, the operators it serves, and its proof."""

    name: str
    primary: str
    """The operator whose signature its function has."""
    serves: tuple[tuple[str, bool], ...]
    """Operators, each with whether raising there is a failure; if not, it means declining."""
    file: Path
    entries: tuple[str, ...]
    digest: str
    proof: Path | None = None
    library: str = ""
    files: tuple[tuple[Path, str], ...] = ()
    """Files of a packed kernel, each with its digest; empty if it is not from a package."""
    plans: Path | None = None
    """Where its launch plans are saved."""
    distrust: str = ""
    """Why the package's statements about it are not trusted; empty if they are."""

    @classmethod
    def from_row(cls, row: Mapping[str, Any], folder: Path) -> Source:
        """Return a source from a row of a package's manifest."""
        proof, library, plans = row.get("proof"), row.get("library"), row.get("plans")
        return cls(
            name=row["name"],
            primary=row["primary"],
            serves=tuple((op, bool(required)) for op, required in row["serves"]),
            file=folder / row["file"],
            entries=tuple(row["entries"]),
            digest=row["digest"],
            proof=folder / proof if proof else None,
            library=str(folder / library) if library else "",
            files=tuple((folder / name, digest) for name, digest in row.get("files", {}).items()),
            plans=folder / plans if plans else None,
        )


def packed_sources(folder: Path) -> list[Source]:
    """Return an installed package's kernels, each with any reason to distrust its signature."""
    rows = json.loads((folder / "kernels.json").read_text(encoding="utf-8"))
    distrust = _distrust_reason(folder, rows)
    return [replace(Source.from_row(row, folder), distrust=distrust) for row in rows]


def packed_signer(folder: Path) -> str | None:
    """Return the name of an installed package's signer; None if the signature is invalid."""
    rows = json.loads((folder / "kernels.json").read_text(encoding="utf-8"))
    return _signer(folder, rows)


def _signer(folder: Path, rows: Any) -> str | None:
    try:
        signature = json.loads(untrusted_files.read(folder / "signature.json"))
    except (OSError, ValueError, RecursionError):
        return None
    return signing.signer_of(rows, signature) if isinstance(signature, dict) else None


def _distrust_reason(folder: Path, rows: Any) -> str:
    signer = _signer(folder, rows)
    if signer is None:
        return f"the signature of {folder.name} is invalid; install the package again, or pack it again"
    trusted = [name.strip() for name in os.environ.get(SIGNERS_VARIABLE, "").split(",") if name.strip()]
    if trusted and signer not in trusted:
        return f"{folder.name} is signed by {signer}, who is not among {SIGNERS_VARIABLE} ({', '.join(trusted)})"
    return ""


@dataclass
class Enabled:
    """Enabled kernels. They stay until ``disable`` is called or the ``with`` block ends."""

    device: str
    policy: str
    learning: str = "never"
    """When launch plans are made; a key of ``LEARN``."""
    refused: dict[str, str] = field(default_factory=dict)
    """Operators with a kernel that could not be installed, and the reasons."""
    overridden_by_torch: list[str] = field(default_factory=list)
    """Operators that torch overrides from Python too: a call that is passed on goes to that override."""
    _kernels: dict[str, InstalledKernel] = field(default_factory=dict)
    _sources: dict[str, Source] = field(default_factory=dict)
    _on: bool = True

    @property
    def operators(self) -> list[str]:
        """Return the operators that have a kernel installed."""
        return list(self._kernels)

    def counters(self) -> dict[str, dict[str, Any]]:
        """Return each operator's kernel, its calls served, and its calls passed on, by reason."""
        key = dispatch_key(self.device)
        for op in self._kernels:
            if (slot := _slots.get((op, key))) is not None:  # without the lock, which an installation holds for long
                slot.collect_counts()
        return {
            op: {"kernel": s.name, "served": s.counts.served, "aten": dict(s.counts.aten), **_plan_counts(s)}
            for op, s in self._kernels.items()
        }

    def learn(self, timeout: float | None = None) -> dict[str, dict[str, Any]]:
        """Make launch plans for the calls seen so far; return how many there are, and why others have none.

        A call with a plan is answered from C++, by the launches that its kernel would make from Python.
        """
        LEARNER.learn(timeout)
        return {
            op: {"plans": len(s.plans.handles), "refused": dict(s.plans.refused + s.plans.not_loaded)}
            for op, s in self._kernels.items()
        }

    def save_plans(self) -> dict[str, int]:
        """Write the launch plans beside their kernels, for later processes; return how many each operator has.

        Plans for calls seen so far are made first.
        """
        self.learn()
        by_source: dict[Source, list[str]] = {}
        for op, source in self._sources.items():
            if op in self._kernels and self._kernels[op].plans.handles:
                by_source.setdefault(source, []).append(op)
        return {op: count for source, ops in by_source.items() for op, count in self._save(source, ops).items()}

    def _save(self, source: Source, ops: list[str]) -> dict[str, int]:
        if source.files or source.plans is None:
            raise RuntimeError(
                f"the launch plans of {source.name} cannot be saved, because it belongs to a package; "
                "enable the directory that was packed, save them there, and pack it again"
            )
        origin = origin_here(source.digest, self.device)
        collection = PlanCollection()
        for op in ops:
            collection.add(op, self._kernels[op].plans.handles, binding.load(), origin.architecture)
        saved = read_plan_file(source.plans)
        others = saved.operators if isinstance(saved, PlanFile) and saved.origin == origin else {}
        plans = PlanFile(origin, {**others, **collection.operators})
        try:
            write_plan_file(source.plans, plans, collection.cubins)
        except OSError as error:
            raise RuntimeError(
                f"the launch plans of {source.name} cannot be saved: {error.strerror}: "
                f"{error.filename or source.plans}; make it writable"
            ) from None
        return {op: len(collection.operators[op].plans) for op in collection.operators}

    def disable(self) -> None:
        """Remove these kernels; other enabled kernels stay. A second call does nothing."""
        with INSTALL_LOCK:
            if not self._on:
                return
            self._on = False
            if self in _enabled:
                _enabled.remove(self)
            key = dispatch_key(self.device)
            for op, server in self._kernels.items():
                place = _slots[op, key]
                place.kernels = tuple(s for s in place.kernels if s is not server)
                others = (other for other in _enabled if dispatch_key(other.device) == key)
                if not any(op in other._kernels for other in others):  # noqa: SLF001
                    _slots.pop((op, key)).restore()
        watch_compilation(on=bool(_enabled))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disable()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


def _plan_counts(kernel: InstalledKernel) -> dict[str, Any]:
    """Return how many of a kernel's calls were replayed, and why saved plans are not used; nothing without plans."""
    handles, not_loaded = list(kernel.plans.handles), kernel.plans.not_loaded
    return {
        **({"replayed": sum(map(binding.load().replays, handles))} if handles else {}),
        **({"plans not loaded": dict(not_loaded)} if not_loaded else {}),
    }


_NEVER_REPLACED = frozenset({"alias.default", "detach.default"})
"""Operators that torch uses to make tensor subclasses.

It demands results that have not passed through Python.
"""
_slots: dict[tuple[str, str], OperatorSlot] = {}
_enabled: list[Enabled] = []
_warnings_given: set[str] = set()
"""Warnings about the native runtime and about torch's own overrides. Each is given once."""


def enable(
    sources: Iterable[Source],
    *,
    device: str | None = None,
    policy: str = "proven",
    ops: Collection[str] | str | None = None,
    learn: str = "background",
) -> Enabled:
    """Install kernels in place of ATen's, for all threads; with ``ops``, only at those operators.

    A bare name in ``ops`` means the whole packet; a string holds names with commas between them. A
    call goes to the kernel enabled last, then to those before it, then to ATen.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy {policy!r} is unknown; allowed: {', '.join(map(repr, POLICIES))}")
    if learn not in LEARN:
        raise ValueError(f"learn={learn!r} is unknown; allowed: {', '.join(map(repr, LEARN))}")
    names = ops.split(",") if isinstance(ops, str) else ops
    wanted = None if names is None else set(select_operators(names, aten_operators()))
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    enabled = Enabled(device, policy, learn)
    saved_plans: dict[str, SavedPlans] = {}
    with INSTALL_LOCK:
        for source in sources:
            saved_plans |= _add(enabled, source, wanted)
        key = dispatch_key(device)
        enabled.overridden_by_torch += overridden_by_torch(key, enabled.operators)
        _warn_of_overrides(enabled, key)
        for op, server in list(enabled._kernels.items()):  # noqa: SLF001  # its own
            try:
                place = _slots.get((op, key)) or _new_slot(_schema(op), key)
            except NativeError as error:
                enabled.refused[op] = str(error)
                del enabled._kernels[op]  # noqa: SLF001
                continue
            _slots[op, key] = place
            if isinstance(place, NativeSlot):
                place.load_plans(server, saved_plans[op])
            place.kernels = (server, *place.kernels)
        if enabled.refused and not enabled._kernels:  # noqa: SLF001
            op, reason = next(iter(enabled.refused.items()))
            warnings.warn(f"no kernel is enabled; {op}: {reason}", KernelWarning, stacklevel=3)
        elif wanted and not enabled._kernels:  # noqa: SLF001
            some = ", ".join(sorted(wanted)[:3]) + ("…" if len(wanted) > 3 else "")
            warnings.warn(f"no kernel is enabled; there is none for {some}", KernelWarning, stacklevel=3)
        _enabled.append(enabled)
    watch_compilation(on=True)
    return enabled


def _warn_of_overrides(enabled: Enabled, key: str) -> None:
    """Warn once of each operator that torch overrides from Python; nothing is installed yet."""
    new = {f"{op} at {key}": op for op in enabled.overridden_by_torch if f"{op} at {key}" not in _warnings_given}
    _warnings_given.update(new)
    if new:
        warnings.warn(
            f"torch overrides {', '.join(new.values())} from Python (torch._native): calls that are passed on go to "
            f"its override, not straight to ATen's kernel; {ADVICE}",
            KernelWarning,
            stacklevel=4,
        )


def disable() -> None:
    """Remove all enabled kernels. The dispatcher is then as it was before the first."""
    for enabled in list(reversed(_enabled)):
        enabled.disable()


def _add(enabled: Enabled, source: Source, ops: Collection[str] | None) -> dict[str, SavedPlans]:
    """Create servers for the operators of a source, and record the refused ones; return the servers' saved plans."""
    operators = [(op, required) for op, required in source.serves if ops is None or op in ops]
    proof = no_proof_reason = None
    if enabled.policy != "all" and operators:
        proof, no_proof_reason = _proof(source, enabled.device)
    function: Function | None = None
    load_error: LoadError | None = None
    learn = enabled.learning if torch.device(enabled.device).type in DEVICE_TYPES else "never"
    saved: SavedPlans | None = None
    added: dict[str, SavedPlans] = {}
    for op, required in operators:
        if op in enabled._kernels:  # noqa: SLF001
            continue
        try:
            proven_domain = _proven_calls(enabled, source, op, proof, no_proof_reason)
            if proven_domain is None:
                continue
            saved = saved or (SavedPlans() if learn == "never" else _saved_plans(source, enabled.device))
            if function is None:
                function = _load_once(source, load_error, lazy=any(saved.serves(op) for op, _ in operators))
            implements = _schema(source.primary)
            kernel = function
            if enabled.policy == "all" and implements.kind == FUNCTIONAL:  # calls are not checked, so results are
                kernel = ResultCheck(implements).wrap(function)
            adapted = adapt(kernel, _schema(op), implements)
        except (LoadError, NotImplementedError, _RefusedError) as error:
            enabled.refused[op] = str(error)
            load_error = error if isinstance(error, LoadError) else load_error
            continue
        proven_calls = None if enabled.policy == "all" else proven_domain
        schema, own = _schema(op), adapted is kernel
        functional = kernel if implements.kind == FUNCTIONAL else None
        installed = InstalledKernel(
            schema, source.name, adapted, proven_calls,
            required=required, unadapted=own, functional=functional, learn=learn,
        )  # fmt: skip
        enabled._kernels[op] = installed  # noqa: SLF001  # its own module
        enabled._sources[op] = source  # noqa: SLF001
        added[op] = saved
    return added


def _new_slot(op: OperatorSchema, key: str) -> OperatorSlot:
    """Return a slot for an operator, native if possible.

    All slots of a process are of one kind, because each kind marks threads inside kernels its own way.
    """
    other = next(iter(_slots.values()), None)
    if isinstance(other, PythonSlot):
        return PythonSlot(op, key)
    library = _native_library() if other is None else binding.load()
    return PythonSlot(op, key) if library is None else NativeSlot(op, key, library)


def _native_library() -> NativeLibrary | None:
    """Return the native runtime; None if it is not wanted or, after a warning, if there is none."""
    if os.environ.get(NATIVE_VARIABLE) == "0":
        return None
    try:
        library = binding.load()
        if torch.cuda.is_available():
            library.load_driver()
    except NativeError as error:
        if str(error) not in _warnings_given:
            _warnings_given.add(str(error))
            warnings.warn(
                f"kernels are called through Python, which is slower: {error}; {NATIVE_VARIABLE}=0 is for no warning",
                KernelWarning,
                stacklevel=2,
            )
        return None
    return library


def _load_once(source: Source, load_error: LoadError | None, *, lazy: bool) -> Function:
    """Load a source's function, now or when it is called. A file that failed to load is not executed again."""
    if load_error is not None:
        raise load_error
    load = functools.partial(load_function, source.file, source.entries, source.library)
    return LazyFunction(load) if lazy else load()


def _saved_plans(source: Source, device: str) -> SavedPlans:
    """Return a source's saved launch plans, or why they cannot be used here."""
    plans = None if source.plans is None else read_plan_file(source.plans, packed=bool(source.files))
    if source.plans is None or plans is None:
        return SavedPlans()
    problem = source.distrust or (plans if isinstance(plans, str) else "")
    if not problem and (edited := _change_since_packing(source)):
        problem = f"{edited} after packing"
    if not problem and isinstance(plans, PlanFile):
        problem = plans.origin.why_not(origin_here(source.digest, device))
    if problem or isinstance(plans, str):
        return SavedPlans(problem=f"saved plans are not used: {problem}")
    return SavedPlans(source.plans.parent, plans)


class _RefusedError(Exception):
    """A kernel cannot be installed at an operator; the message says why."""


def _proven_calls(
    enabled: Enabled, source: Source, op: str, proof: Mapping[str, Any] | None, no_proof_reason: str | None
) -> ProvenCalls | None:
    """Return the domain of a kernel at an operator; raise if the kernel cannot serve it."""
    op_facts = _schema(op)
    if reason := why_not_installable(op, source.primary, enabled.device):
        raise _RefusedError(reason)
    if enabled.policy == "all":
        return ProvenCalls(op_facts, {}, check_speed=False)
    if proof is None:
        raise _RefusedError(
            no_proof_reason or f"{source.name} has no proof; judge it with `opforge run`, or use policy='all'"
        )
    rows = proof["operators"].get(op)
    if not rows:
        raise _RefusedError(f"{source.name} is not proven for {op}")
    proven_calls = ProvenCalls(op_facts, rows, check_speed=enabled.policy == "proven")
    if not proven_calls.serves_any:
        raise _RefusedError(
            f"{source.name} was not timed for {op}, or is slower than ATen at every size; policy='right' uses it anyway"
        )
    return proven_calls


def why_not_installable(op: str, primary: str, device: str) -> str:
    """Say why no kernel with the signature of ``primary`` can be installed at an operator; empty if it can."""
    op_facts = _schema(op)
    if op_facts.composite:
        return (
            f"{op} is made of other operators (CompositeImplicitAutograd): overriding it would cut off gradients. "
            "Write a kernel for one of these operators"
        )
    if op in _NEVER_REPLACED:
        return (
            f"results of {op} become parameters or other tensor subclasses, "
            "which is impossible for results of a Python kernel"
        )
    if op_facts.kind == OUT and "nondeterministic_seeded" in op_facts.tags and _schema(primary).kind == FUNCTIONAL:
        return f"{op} uses random numbers, and a kernel for {primary} would use them up before it declines"
    has = torch._C._dispatch_has_computed_kernel_for_dispatch_key  # noqa: SLF001
    if not has(f"aten::{op.removesuffix('.default')}", dispatch_key(device)):
        return f"{op} has no ATen kernel for {dispatch_key(device)} to override"
    return ""


def _proof(source: Source, device: str) -> tuple[Mapping[str, Any] | None, str | None]:
    """Return a source's proof, or the reason why none is valid here."""
    if source.distrust:
        return None, source.distrust
    proof = None if source.proof is None else proof_files.read_proof_file(source.proof, packed=bool(source.files))
    if proof is None or isinstance(proof, str):
        return None, proof
    proven_torch, proven_device = proof["torch"], proof["device"]
    if proof["digest"] != source.digest:
        return None, f"{source.file.name} has changed since it was proven; judge it again with `opforge run`"
    if edited := _change_since_packing(source):
        return None, f"{edited} after packing; install the package again, or judge the kernel and pack it again"
    current = {"torch": ".".join(torch.__version__.split(".")[:2]), "device": device_name(device)}
    if ".".join(proven_torch.split(".")[:2]) != current["torch"]:
        return None, f"{source.name} was proven with torch {proven_torch}, and this is {torch.__version__}"
    if proven_device != current["device"]:
        return None, f"{source.name} was proven on {proven_device}, and this is {current['device']}"
    if not proof["operators"] and (summary := proof_files.failure_summary(proof["failed"])):
        return None, f"{source.name} is not proven: {summary}; fix it, and judge it again with `opforge run`"
    return proof, None


def _change_since_packing(source: Source) -> str:
    """Say how a packed kernel differs from what was packed; empty if it does not."""
    for file, digest in source.files:
        try:
            unchanged = hashlib.sha256(file.read_bytes()).hexdigest() == digest
        except OSError:
            return f"{file.name} was removed"
        if not unchanged:
            return f"{file.name} was changed"
    packed_files = {file for file, _ in source.files}
    for file in source.file.parent.rglob("*") if packed_files else ():
        if file.suffix in (".py", ".so") and file not in packed_files:  # it may shadow another module
            return f"{file.name} was added"
    return ""


def _schema(op: str) -> OperatorSchema:
    op_facts = schema_of(op)
    if op_facts is None:
        raise _RefusedError(f"this torch ({torch.__version__}) has no operator {op}")
    return op_facts
