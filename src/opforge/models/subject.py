"""Make the model to run, inside a worker: its code is the user's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from opforge.errors import OpforgeError
from opforge.models.target import Target
from opforge.sandbox.loader import KernelLoadError, describe_exception, import_file
from opforge.traces.targets import Settings
from opforge.traces.targets import Target as Traced


class SubjectError(Exception):
    """There is no model to run; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and its inputs."""

    model: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], torch.Tensor] | None = None
    """Computes the loss from the model's output, for training; None for the default loss."""
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    """Makes an optimizer from the model's parameters, for training; None for the default."""

    @classmethod
    def of(cls, model: Any, inputs: Any, loss: Any = None, optimizer: Any = None) -> Subject:
        """Return a subject from the user's objects.

        Inputs are a tuple, a dict by name, or one tensor.
        """
        if not isinstance(model, torch.nn.Module):
            raise SubjectError(f"the model is {type(model).__name__}, not a torch.nn.Module")
        if loss is not None and not callable(loss):
            raise SubjectError(f"loss is {type(loss).__name__}, not a function of the model's output")
        if optimizer is not None and not callable(optimizer):
            raise SubjectError(f"optimizer is {type(optimizer).__name__}, not a function of the model's parameters")
        if isinstance(inputs, Mapping):
            return cls(model, (), dict(inputs), loss, optimizer)
        if isinstance(inputs, torch.Tensor):
            inputs = (inputs,)
        if not isinstance(inputs, tuple | list):
            raise SubjectError(
                f"the inputs are {type(inputs).__name__}; allowed: a tuple, a dict by name, or one tensor"
            )
        return cls(model, tuple(inputs), {}, loss, optimizer)


def load(target: Target, *, train: bool = False) -> Subject:
    """Return the model and inputs of a target; raises SubjectError with the reason if it has none.

    Another kind of model needs a branch here, and one in `target.find`, which locates its code.
    """
    if target.library:
        return _load_architecture(target, train=train)
    return _load_file(Path(target.file)) if target.file else _load_function(target)


def _load_architecture(target: Target, *, train: bool) -> Subject:
    from opforge.traces.architectures import make

    settings = replace(Settings(**target.settings), train=train)
    try:
        traced = make(Traced(target.library, target.architecture), settings)
    except OpforgeError as error:
        raise SubjectError(str(error)) from None
    except BaseException as error:  # noqa: BLE001  # boundary: third-party code
        raise SubjectError(f"{target.name} could not be made: {describe_exception(error)}") from None
    return Subject(traced.model, traced.args, traced.kwargs)


def _load_file(path: Path) -> Subject:
    try:
        module = import_file(path)
    except KernelLoadError as error:
        raise SubjectError(str(error)) from None
    results = {}
    for name in ("model", "inputs"):
        function = getattr(module, name, None)
        if not callable(function):
            raise SubjectError(f"{path.name} does not define {name}(); it must define model() and inputs()")
        results[name] = _call_user_function(function, f"{name}() of {path.name}", path)
    return Subject.of(
        results["model"], results["inputs"], getattr(module, "loss", None), getattr(module, "optimizer", None)
    )


def _load_function(target: Target) -> Subject:
    if target.folder not in sys.path:
        sys.path.insert(0, target.folder)
    try:
        module = importlib.import_module(target.module)
    except BaseException as error:  # noqa: BLE001  # boundary: user code
        raise SubjectError(f"{target.module} raised while it was imported: {describe_exception(error)}") from None
    function = getattr(module, target.function, None)
    if not callable(function):
        raise SubjectError(f"{target.module} has no function {target.function!r}")
    returned = _call_user_function(function, target.name, Path(module.__file__ or ""))
    if isinstance(returned, Subject):
        return returned
    if not isinstance(returned, tuple | list) or len(returned) not in (2, 3, 4):
        raise SubjectError(
            f"{target.name} returned {type(returned).__name__}, not (model, inputs), with a loss and an optimizer after them if you like"
        )
    return Subject.of(*returned)


def _call_user_function(function: Callable[[], Any], label: str, path: Path) -> Any:
    try:
        return function()
    except BaseException as error:  # noqa: BLE001  # boundary: user code
        raise SubjectError(f"{label} raised {describe_exception(error, path)}") from None
