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
from opforge.models.target import ModelTarget
from opforge.sandbox.guest.loader import KernelLoadError, describe_exception, import_file
from opforge.traces.targets import Settings
from opforge.traces.targets import Target as Traced


class UnusableModelError(Exception):
    """There is no model to run; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and its inputs."""

    model: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], torch.Tensor] | None = None
    """Computes the loss from the model's output, for training; None for the default loss."""
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    """Makes an optimizer from the model's parameters, for training; None for the default."""

    @classmethod
    def from_user(cls, model: Any, inputs: Any, loss: Any = None, optimizer: Any = None) -> LoadedModel:
        """Return a subject from the user's objects.

        Inputs are a tuple, a dict by name, or one tensor.
        """
        if not isinstance(model, torch.nn.Module):
            raise UnusableModelError(f"the model is {type(model).__name__}, not a torch.nn.Module")
        if loss is not None and not callable(loss):
            raise UnusableModelError(f"loss is {type(loss).__name__}, not a function of the model's output")
        if optimizer is not None and not callable(optimizer):
            raise UnusableModelError(
                f"optimizer is {type(optimizer).__name__}, not a function of the model's parameters"
            )
        if isinstance(inputs, Mapping):
            return cls(model, (), dict(inputs), loss, optimizer)
        if isinstance(inputs, torch.Tensor):
            inputs = (inputs,)
        if not isinstance(inputs, tuple | list):
            raise UnusableModelError(
                f"the inputs are {type(inputs).__name__}; allowed: a tuple, a dict by name, or one tensor"
            )
        return cls(model, tuple(inputs), {}, loss, optimizer)


def load_model(target: ModelTarget, *, train: bool = False) -> LoadedModel:
    """Return the model and inputs of a target; raises UnusableModelError with the reason if it has none.

    Another kind of model needs a branch here, and one in `find_model`, which locates its code.
    """
    if target.library:
        return _load_architecture(target, train=train)
    return _load_file(target) if target.file else _load_function(target)


def _load_architecture(target: ModelTarget, *, train: bool) -> LoadedModel:
    from opforge.traces.architectures import build_model

    settings = replace(Settings(**target.settings), train=train)
    try:
        traced = build_model(Traced(target.library, target.architecture), settings)
    except OpforgeError as error:
        raise UnusableModelError(str(error)) from None
    except BaseException as error:  # noqa: BLE001  # boundary: third-party code
        raise UnusableModelError(f"{target.name} could not be made: {describe_exception(error)}") from None
    return LoadedModel(traced.model, traced.args, traced.kwargs)


def import_code(target: ModelTarget) -> Any:
    """Import the file or module of a target; raise UnusableModelError with the reason if it fails."""
    if target.file:
        try:
            return import_file(Path(target.file))
        except KernelLoadError as error:
            raise UnusableModelError(str(error)) from None
    if target.folder not in sys.path:
        sys.path.insert(0, target.folder)
    try:
        return importlib.import_module(target.module)
    except BaseException as error:  # noqa: BLE001  # boundary: user code
        raise UnusableModelError(f"{target.module} raised while it was imported: {describe_exception(error)}") from None


def _load_file(target: ModelTarget) -> LoadedModel:
    module, path, results = import_code(target), Path(target.file), {}
    for name in ("model", "inputs"):
        function = getattr(module, name, None)
        if not callable(function):
            raise UnusableModelError(f"{path.name} does not define {name}(); it must define model() and inputs()")
        results[name] = _call_user_function(function, f"{name}() of {path.name}", path)
    return LoadedModel.from_user(
        results["model"], results["inputs"], getattr(module, "loss", None), getattr(module, "optimizer", None)
    )


def _load_function(target: ModelTarget) -> LoadedModel:
    module = import_code(target)
    function = getattr(module, target.function, None)
    if not callable(function):
        raise UnusableModelError(f"{target.module} has no function {target.function!r}")
    returned = _call_user_function(function, target.name, Path(module.__file__ or ""))
    if isinstance(returned, LoadedModel):
        return returned
    if not isinstance(returned, tuple | list) or len(returned) not in (2, 3, 4):
        raise UnusableModelError(
            f"{target.name} returned {type(returned).__name__}, not (model, inputs), optionally followed by a loss "
            "and an optimizer"
        )
    return LoadedModel.from_user(*returned)


def _call_user_function(function: Callable[[], Any], label: str, path: Path) -> Any:
    try:
        return function()
    except BaseException as error:  # noqa: BLE001  # boundary: user code
        raise UnusableModelError(f"{label} raised {describe_exception(error, path)}") from None
