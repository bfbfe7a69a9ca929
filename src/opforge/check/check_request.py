"""What to check: the target (a package, its folder, a file, or an operator by name) and options."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from opforge.check.findings import CHECKS
from opforge.errors import MAX_TIMEOUT_S, MIN_TIMEOUT_S, OpforgeError, UnknownNameError, check_range

_OPERATOR_NAME = re.compile(r"(?P<ns>\w+)::(?P<name>\w+(?:\.\w+)?)")
_MODULE = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")


@dataclass(frozen=True, slots=True)
class CheckTarget:
    """The module or file to import, and its search paths; or an operator already registered."""

    text: str
    module: str = ""
    """Module to import."""
    file: str = ""
    """File to run instead of a module."""
    paths: tuple[str, ...] = ()
    """Folders to prepend to ``sys.path``."""
    operator: str = ""
    """Operator name, if the target is a single operator."""


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """Options of a check."""

    device: str = "cpu"
    ops: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    inputs: str = ""
    timeout_s: float = 60.0
    workers: int = 2

    def __post_init__(self) -> None:
        kind, _, number = self.device.partition(":")
        if kind not in ("cpu", "cuda") or (number and not (kind == "cuda" and number.isdigit())):
            raise OpforgeError(f"unknown device {self.device!r}; allowed: cpu, cuda, cuda:N")
        for name in self.skip:
            if name not in CHECKS or name == "inputs":
                raise UnknownNameError("check", name, [check for check in CHECKS if check != "inputs"])
        check_range("--timeout", self.timeout_s, MIN_TIMEOUT_S, MAX_TIMEOUT_S)
        check_range("--workers", self.workers, 1, 256)
        if self.inputs and not Path(self.inputs).is_file():
            raise OpforgeError(f"there is no file {self.inputs!r} for --inputs")


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """The request to the child process."""

    target: CheckTarget
    options: CheckOptions

    def wire(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_wire(cls, text: str) -> CheckRequest:
        fields = json.loads(text)
        target, options = fields["target"], fields["options"]
        return cls(
            CheckTarget(**{**target, "paths": tuple(target["paths"])}),
            CheckOptions(**{**options, "ops": tuple(options["ops"]), "skip": tuple(options["skip"])}),
        )


def parse_target(text: str, module: str = "") -> CheckTarget:
    """Parse a target; ``module`` names the module that registers an operator given by name."""
    if "::" in text:
        return _operator(text, module)
    if module:
        raise OpforgeError(f"--import {module} requires an operator such as ns::op, not {text!r}; remove --import")
    path = Path(text)
    if path.suffix == ".py":
        if not path.is_file():
            raise OpforgeError(f"there is no file {text!r}")
        return CheckTarget(text, file=str(path.resolve()), paths=(str(path.resolve().parent),))
    if path.is_dir() and ("/" in text or text in (".", "..") or not (path / "__init__.py").is_file()):
        return _folder(text, path.resolve())
    if _MODULE.fullmatch(text):
        return CheckTarget(text, module=text, paths=(str(Path.cwd()),))
    raise OpforgeError(
        f"{text!r} is neither a folder, nor a .py file, nor the name of a package, nor an operator; "
        "give one of them, such as my_ops, ./my_ops, my_ops.py or my_ops::op"
    )


def _operator(text: str, module: str) -> CheckTarget:
    if _OPERATOR_NAME.fullmatch(text) is None:
        raise OpforgeError(f"{text!r} is not the name of an operator; names are ns::op or ns::op.overload")
    if not module:
        return CheckTarget(text, operator=text)
    inner = parse_target(module)
    return CheckTarget(text, module=inner.module, file=inner.file, paths=inner.paths, operator=text)


def _folder(text: str, folder: Path) -> CheckTarget:
    """Find the only package of a folder: the folder itself, one in its src/, or one in it."""
    if (folder / "__init__.py").is_file():
        return CheckTarget(text, module=folder.name, paths=(str(folder.parent),))
    for root in (folder / "src", folder):
        packages = sorted(
            path.parent.name for path in root.glob("*/__init__.py") if path.parent.name not in _NON_PACKAGE_FOLDERS
        )
        if len(packages) == 1:
            return CheckTarget(text, module=packages[0], paths=(str(root),))
        if packages:
            raise OpforgeError(
                f"{text!r} holds several packages ({', '.join(packages)}); give the folder of one of them"
            )
    raise OpforgeError(
        f"the folder {text!r} holds no package: neither it nor a folder in it or in its src/ has an __init__.py"
    )


_NON_PACKAGE_FOLDERS = {"tests", "test", "docs", "benchmarks", "examples", "build", "dist"}
