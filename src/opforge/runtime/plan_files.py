"""Launch plans in files: beside a kernel, or with it in a package. Needs no torch.

A kernel's file holds its plans. The compiled kernels that they launch are in ``cubins`` beside it, each
named by its SHA-256. Outside packages, only files that this installation has signed are trusted: a plan
is code, and whoever wrote the kernel may have written the file too.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from . import signing, untrusted_files

PLANS_SUFFIX = ".plans.json"
CUBIN_FOLDER = "cubins"
PLANS_FORMAT = 1
"""Version of the file that is written now."""
_MAX_PLANS = 4096
"""Plans of one operator."""
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


def plans_path(file: Path) -> Path:
    """Return the path of the launch plans of a kernel's file: beside it."""
    return file.with_name(file.stem + PLANS_SUFFIX)


@dataclass(frozen=True, slots=True)
class PlanOrigin:
    """What launch plans depend on, beside the calls that they are for."""

    digest: str
    """Of the kernel's source."""
    architecture: str
    """Of the GPU, such as sm_90."""
    device: str
    """The GPU's product name: kernels may choose a grid by it."""
    torch: str
    """Minor version."""
    triton: str
    abi: int
    """Version of the native library, which fixes the form of keys and plans."""

    def why_not(self, here: PlanOrigin) -> str:
        """Say why plans of this origin cannot be used here; empty if they can."""
        if self.digest != here.digest:
            return "the kernel has changed since they were made"
        for field in fields(self):
            made, present = getattr(self, field.name), getattr(here, field.name)
            if present not in (made, ""):  # without Triton, plans are all there is
                return f"they were made for {field.name} {made}, and this is {present}"
        return ""


@dataclass(frozen=True, slots=True)
class CompiledFunction:
    """A function that a plan launches: its file by SHA-256, and its name there."""

    cubin: str
    name: str


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """A launch plan, and the calls that it is for."""

    key: tuple[int, ...]
    """Modes, numbers and the words of the geometry, as the native library writes them."""
    plan: dict[str, Any]
    """The wire form of a LaunchPlan. A launch's ``function`` is a position in the operator's functions."""


@dataclass(frozen=True, slots=True)
class OperatorPlans:
    """The launch plans of a kernel at one operator."""

    functions: tuple[CompiledFunction, ...]
    plans: tuple[SavedPlan, ...]

    def wire(self) -> dict[str, Any]:
        plans = [{"key": list(saved.key), "plan": saved.plan} for saved in self.plans]
        return {"functions": [asdict(function) for function in self.functions], "plans": plans}

    @classmethod
    def from_wire(cls, raw: Mapping[str, Any]) -> OperatorPlans:
        functions = tuple(CompiledFunction(_sha256(row["cubin"]), _text(row["name"])) for row in raw["functions"])
        plans = tuple(SavedPlan(tuple(map(_word, row["key"])), dict(row["plan"])) for row in raw["plans"])
        if len(plans) > _MAX_PLANS:
            raise ValueError(len(plans))
        return cls(functions, plans)


@dataclass(frozen=True, slots=True)
class PlanFile:
    """The launch plans of a kernel, by operator."""

    origin: PlanOrigin
    operators: dict[str, OperatorPlans]

    @property
    def cubins(self) -> set[str]:
        """Return the SHA-256 of each compiled kernel."""
        return {function.cubin for plans in self.operators.values() for function in plans.functions}

    @property
    def count(self) -> int:
        """Return the number of plans."""
        return sum(len(plans.plans) for plans in self.operators.values())

    def wire(self) -> dict[str, Any]:
        """Return what is signed and written."""
        operators = {op: plans.wire() for op, plans in self.operators.items()}
        return {"opforge_plans": PLANS_FORMAT, "origin": asdict(self.origin), "operators": operators}

    @classmethod
    def from_wire(cls, raw: Mapping[str, Any]) -> PlanFile:
        """Return the plans of a file; raise if a field is missing or has a wrong type or value."""
        texts = {name: _text(raw["origin"][name]) for name in ("digest", "architecture", "device", "torch", "triton")}
        origin = PlanOrigin(**texts, abi=_word(raw["origin"]["abi"]))
        return cls(origin, {_text(op): OperatorPlans.from_wire(row) for op, row in raw["operators"].items()})


def read_plan_file(path: Path, *, packed: bool = False) -> PlanFile | str | None:
    """Return a kernel's plans; else why they are unusable, or None if there are none.

    A ``packed`` file belongs to a package, which its maker signs as a whole.
    """
    try:
        raw = json.loads(untrusted_files.read(path))
        if (version := raw["opforge_plans"]) != PLANS_FORMAT:
            return f"{path.name} is of another format ({str(version)[:20]})"
        plans = PlanFile.from_wire(raw)
        trusted = packed or signing.verify_mac(signing.load_key(), plans.wire(), raw.get("signature"))
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{path.name} is broken"
    return plans if trusted else f"{path.name} was not signed by this installation of opforge"


def write_plan_file(path: Path, plans: PlanFile, cubins: Mapping[str, bytes]) -> None:
    """Write a kernel's plans, signed, and the compiled kernels that are not there yet; raise OSError."""
    wire = plans.wire()
    text = json.dumps({**wire, "signature": signing.mac(signing.load_or_create_key(), wire)}) + "\n"
    if len(text) > untrusted_files.MAX_FILE_BYTES:
        raise OSError(0, f"{plans.count} launch plans take {len(text)} bytes, and files of this size are not read")
    for digest in sorted(plans.cubins & set(cubins)):
        _write(_cubin_path(path.parent, digest), cubins[digest])
    _write(path, text.encode())


def read_cubin(folder: Path, digest: str) -> bytes:
    """Return a compiled kernel from beside a plan file; raise OSError or ValueError if it is gone or was changed."""
    path = _cubin_path(folder, digest)
    cubin = untrusted_files.read(path)
    if hashlib.sha256(cubin).hexdigest() != digest:
        raise ValueError(f"{path} was changed: its SHA-256 is not its name")
    return cubin


def _cubin_path(folder: Path, digest: str) -> Path:
    return folder / CUBIN_FOLDER / f"{digest}.cubin"


def _write(path: Path, data: bytes) -> None:
    """Write a file as a whole."""
    path.parent.mkdir(exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        draft.write_bytes(data)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _sha256(value: Any) -> str:
    if not _SHA256.fullmatch(value):
        raise ValueError(value)
    return str(value)


def _word(value: Any) -> int:
    """Return an unsigned number of 64 bits unchanged. True is not a number here."""
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError(value)
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(value)
    return value
