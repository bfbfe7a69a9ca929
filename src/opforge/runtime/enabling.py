"""Install kernels in place of ATen's in this process, count their calls, and remove them."""

from __future__ import annotations

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

from . import files, proofs, signing
from .adapters import adapt
from .compiling import watch_compilation
from .devices import device_name
from .domain import Domain
from .facts import FUNCTIONAL, OUT, Facts, facts
from .loading import Function, LoadError, load
from .originals import device_key
from .results import Likeness
from .serving import LOCK, KernelWarning, Place, Server

SIGNERS_VARIABLE = "OPFORGE_SIGNERS"
"""Environment variable with the trusted signers. Without it, all signers are trusted."""
POLICIES = {
    "proven": "calls for which a kernel is proven right, at sizes at which it was timed and is not slower",
    "right": "calls for which a kernel is proven right, however fast",
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
    distrust: str = ""
    """Why the package's statements about it are not trusted; empty if they are."""

    @classmethod
    def of(cls, row: Mapping[str, Any], folder: Path) -> Source:
        """Return a source from a row of a package's manifest."""
        proof, library = row.get("proof"), row.get("library")
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
        )


def packed_sources(folder: Path) -> list[Source]:
    """Return an installed package's kernels, each with any reason to distrust its signature."""
    rows = json.loads((folder / "kernels.json").read_text(encoding="utf-8"))
    distrust = _distrust(folder, rows)
    return [replace(Source.of(row, folder), distrust=distrust) for row in rows]


def packed_signer(folder: Path) -> str | None:
    """Return the name of an installed package's signer; None if the signature is invalid."""
    rows = json.loads((folder / "kernels.json").read_text(encoding="utf-8"))
    return _signer(folder, rows)


def _signer(folder: Path, rows: Any) -> str | None:
    try:
        signature = json.loads(files.read(folder / "signature.json"))
    except (OSError, ValueError, RecursionError):
        return None
    return signing.signer_of(rows, signature) if isinstance(signature, dict) else None


def _distrust(folder: Path, rows: Any) -> str:
    signer = _signer(folder, rows)
    if signer is None:
        return f"the signature of {folder.name} does not hold; install the package again, or pack it again"
    wanted = [name.strip() for name in os.environ.get(SIGNERS_VARIABLE, "").split(",") if name.strip()]
    if wanted and signer not in wanted:
        return f"{folder.name} is signed by {signer}, who is not among {SIGNERS_VARIABLE} ({', '.join(wanted)})"
    return ""


@dataclass
class Enabled:
    """Enabled kernels. They stay until ``disable`` is called or the ``with`` block ends."""

    device: str
    policy: str
    refused: dict[str, str] = field(default_factory=dict)
    """Operators with a kernel that could not be installed, and the reasons."""
    _servers: dict[str, Server] = field(default_factory=dict)
    _on: bool = True

    @property
    def operators(self) -> list[str]:
        """Return the operators that have a kernel installed."""
        return list(self._servers)

    def counters(self) -> dict[str, dict[str, Any]]:
        """Return each operator's kernel, its calls served, and its calls passed on, by reason."""
        return {
            op: {"kernel": s.kernel, "served": s.count.served, "aten": dict(s.count.aten)}
            for op, s in self._servers.items()
        }

    def disable(self) -> None:
        """Remove these kernels; other enabled kernels stay. A second call does nothing."""
        with LOCK:
            if not self._on:
                return
            self._on = False
            if self in _enabled:
                _enabled.remove(self)
            key = device_key(self.device)
            for op, server in self._servers.items():
                place = _places[op, key]
                place.servers = tuple(s for s in place.servers if s is not server)
                if not any(op in other._servers for other in _enabled if device_key(other.device) == key):  # noqa: SLF001
                    _places.pop((op, key)).leave()
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


_LEFT_ALONE = frozenset({"alias.default", "detach.default"})
"""Operators that torch uses to make tensor subclasses.

It demands results that have not passed through Python.
"""
_places: dict[tuple[str, str], Place] = {}
_enabled: list[Enabled] = []


def enable(
    sources: Iterable[Source], *, device: str | None = None, policy: str = "proven", ops: Collection[str] | None = None
) -> Enabled:
    """Install kernels in place of ATen's, for all threads; with ``ops``, only at those operators.

    A call goes to the kernel enabled last, then to those before it, then to ATen.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy {policy!r} is unknown; there are {', '.join(map(repr, POLICIES))}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    made = Enabled(device, policy)
    with LOCK:
        for source in sources:
            _add(made, source, ops)
        if made.refused and not made._servers:  # noqa: SLF001  # its own
            op, reason = next(iter(made.refused.items()))
            warnings.warn(f"no kernel is put in place; {op}: {reason}", KernelWarning, stacklevel=3)
        key = device_key(device)
        for op, server in made._servers.items():  # noqa: SLF001  # its own
            place = _places.get((op, key))
            if place is None:
                place = _places[op, key] = Place(_facts(op), key)
            place.servers = (server, *place.servers)
        _enabled.append(made)
    watch_compilation(on=True)
    return made


def disable() -> None:
    """Remove all enabled kernels. The dispatcher is then as it was before the first."""
    for made in list(reversed(_enabled)):
        made.disable()


def _add(made: Enabled, source: Source, ops: Collection[str] | None) -> None:
    """Create servers for the operators of a source, and record the refused ones."""
    wanted = [(op, required) for op, required in source.serves if ops is None or op in ops]
    proof = void = None
    if made.policy != "all" and wanted:
        proof, void = _proof(source, made.device)
    function: Function | None = None
    broken: LoadError | None = None
    for op, required in wanted:
        if op in made._servers:  # noqa: SLF001
            continue
        try:
            found = _server(made, source, op, proof, void)
            if found is None:
                continue
            if function is None:
                function = _loaded(source, broken)
            implements = _facts(source.primary)
            asked = function
            if made.policy == "all" and implements.form == FUNCTIONAL:  # calls are not checked, so results are
                asked = Likeness(implements).checked(function)
            adapted = adapt(asked, _facts(op), implements)
        except (LoadError, NotImplementedError, _RefusedError) as error:
            made.refused[op] = str(error)
            broken = error if isinstance(error, LoadError) else broken
            continue
        domain = None if made.policy == "all" else found
        own_form = adapted is asked
        made._servers[op] = Server(_facts(op), source.name, adapted, domain, required=required, own_form=own_form)  # noqa: SLF001


def _loaded(source: Source, broken: LoadError | None) -> Function:
    """Load a source's function. A file that failed to load is not executed again."""
    if broken is not None:
        raise broken
    return load(source.file, source.entries, source.library)


class _RefusedError(Exception):
    """A kernel cannot be installed at an operator; the message says why."""


def _server(made: Enabled, source: Source, op: str, proof: Mapping[str, Any] | None, void: str | None) -> Domain | None:
    """Return the domain of a kernel at an operator; raise if the kernel cannot serve it."""
    known = _facts(op)
    if known.composite:
        raise _RefusedError(
            f"{op} is made of other operators (CompositeImplicitAutograd): a kernel in its place would cut off gradients. "
            "Write one for an operator that it is made of"
        )
    if op in _LEFT_ALONE:
        raise _RefusedError(
            f"what {op} returns becomes a parameter, or another subclass of a tensor, which nothing can that Python has seen"
        )
    if known.form == OUT and "nondeterministic_seeded" in known.tags and _facts(source.primary).form == FUNCTIONAL:
        raise _RefusedError(
            f"{op} draws random numbers, which a kernel for {source.primary} has drawn when it declines"
        )
    has = torch._C._dispatch_has_computed_kernel_for_dispatch_key  # noqa: SLF001
    name = f"aten::{op.removesuffix('.default')}"
    if not has(name, device_key(made.device)):
        raise _RefusedError(f"{op} has no kernel of ATen's for {device_key(made.device)} to be put in place of")
    if made.policy == "all":
        return Domain(known, {}, speed=False)
    if proof is None:
        raise _RefusedError(void or f"{source.name} has no proof; judge it with `opforge run`, or take policy='all'")
    rows = proof["operators"].get(op)
    if not rows:
        raise _RefusedError(f"{source.name} is not proven for {op}")
    domain = Domain(known, rows, speed=made.policy == "proven")
    if not domain.serves_any:
        raise _RefusedError(
            f"{source.name} is at no size both timed and not slower than ATen at {op}; policy='right' takes it all the same"
        )
    return domain


def _proof(source: Source, device: str) -> tuple[Mapping[str, Any] | None, str | None]:
    """Return a source's proof, or the reason why none is valid here."""
    if source.distrust:
        return None, source.distrust
    proof = None if source.proof is None else proofs.read(source.proof, packed=bool(source.files))
    if proof is None or isinstance(proof, str):
        return None, proof
    made_with, on = proof["torch"], proof["device"]
    if proof["digest"] != source.digest:
        return None, f"{source.file.name} has changed since it was proven; judge it again with `opforge run`"
    if edited := _edited(source):
        return None, f"{edited} since it was packed; install the package again, or judge the kernel and pack it again"
    here = {"torch": ".".join(torch.__version__.split(".")[:2]), "device": device_name(device)}
    if ".".join(made_with.split(".")[:2]) != here["torch"]:
        return None, f"{source.name} was proven with torch {made_with}, and this is {torch.__version__}"
    if on != here["device"]:
        return None, f"{source.name} was proven on {on}, and this is {here['device']}"
    if not proof["operators"] and (words := proofs.failures(proof["failed"])):
        return None, f"{source.name} is not proven: {words}; mend it, and judge it again with `opforge run`"
    return proof, None


def _edited(source: Source) -> str:
    """Say how a packed kernel differs from what was packed; empty if it does not."""
    for file, digest in source.files:
        try:
            same = hashlib.sha256(file.read_bytes()).hexdigest() == digest
        except OSError:
            return f"{file.name} has gone"
        if not same:
            return f"{file.name} has changed"
    known = {file for file, _ in source.files}
    for file in source.file.parent.rglob("*") if known else ():
        if file.suffix in (".py", ".so") and file not in known:  # it may shadow another module
            return f"{file.name} has come"
    return ""


def _facts(op: str) -> Facts:
    found = facts(op)
    if found is None:
        raise _RefusedError(f"this torch ({torch.__version__}) has no operator {op}")
    return found
