"""Targets of a trace: a function, a script, or an architecture by name. Needs no torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from opforge.cases.values import DTYPES
from opforge.errors import OpforgeError, check_range

LIBRARIES = {"hf": "transformers", "timm": "timm", "torchvision": "torchvision"}
"""Prefix of an architecture's name, and the package that has it."""
SCRIPT, FUNCTION = "script", "function"


_MAX_EXTENT = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Target:
    """Program to trace."""

    kind: str
    """``script``, ``function``, or a key of LIBRARIES."""
    name: str
    args: tuple[str, ...] = ()
    """Command-line arguments of a script."""

    @property
    def model_name(self) -> str:
        """Return the model name for its calls."""
        return Path(self.name).stem if self.kind == SCRIPT else self.name

    @property
    def is_architecture(self) -> bool:
        return self.kind in LIBRARIES


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings for running a target.

    All but the first two are for architectures; their model and inputs are built here.
    """

    device: str = "cpu"
    fake: bool = False
    """Whether tensors have no contents, so that a model of any size fits."""
    dtype: str = "f32"
    train: bool = False
    batch: int = 1
    seq: int = 128
    image: int | None = None
    """Side length in pixels; None for the architecture's default."""
    layers: int | None = None
    """Maximum number of layers; None for all of the architecture's."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the configuration; a dot leads into a nested part."""

    def checked(self) -> Settings:
        """Return the settings; raise if one is out of range."""
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise OpforgeError(f"unknown device {self.device!r}; allowed: cpu, cuda, cuda:N")
        for name in ("batch", "seq", "image", "layers"):
            if (value := getattr(self, name)) is not None:
                check_range(f"--{name}", value, 1, _MAX_EXTENT)
        if not DTYPES[self.dtype][0].startswith(("float", "bfloat")) or DTYPES[self.dtype][1] == 1:
            raise OpforgeError(f"--dtype {self.dtype} is not a dtype for a model; allowed: f32, f16, bf16, f64")
        return self

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def parse_target(text: str, args: tuple[str, ...] = ()) -> Target:
    """Parse ``{hf,timm,torchvision}:NAME``, ``script.py`` or ``module:function``."""
    head, separator, name = text.partition(":")
    target = None
    if separator and head in LIBRARIES and name:
        target = Target(head, name)
    elif text.endswith(".py") and (args or not separator or Path(text).exists()):
        if not Path(text).is_file():
            raise OpforgeError(f"there is no script {text}")
        return Target(SCRIPT, str(Path(text).resolve()), args)
    elif separator and re.fullmatch(r"[\w.]+", head) and re.fullmatch(r"\w+", name):
        target = Target(FUNCTION, text)
    if target is None:
        raise OpforgeError(
            f"{text!r} cannot be traced; allowed: script.py, module:function, "
            "hf:NAME (a model class of transformers, such as hf:BertModel), timm:NAME, torchvision:NAME, "
            "or a trace or operator-input log to be converted"
        )
    if args:
        raise OpforgeError(f"arguments ({' '.join(args)}) are for scripts only, and {text} is not one")
    return target


def parse_changes(assignments: list[str]) -> dict[str, Any]:
    """Parse ``--set name=value``; a value is a Python literal, or else a string."""
    changes: dict[str, Any] = {}
    for word in assignments:
        name, separator, text = word.partition("=")
        if not (separator and re.fullmatch(r"\w+(\.\w+)*", name)):
            raise OpforgeError(f"--set {word!r} is not NAME=VALUE, for example hidden_size=256")
        try:
            changes[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            changes[name] = text
    return changes
