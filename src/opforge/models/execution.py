"""One model in one process, run repeatedly from the same weights, inputs and seed.

Results are returned by name.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from opforge.models.subject import Subject, SubjectError
from opforge.models.wide import Wide
from opforge.sandbox.state import seed_generator

LOSS = "loss"
_SGD_OPTIONS = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.01}
"""Default optimizer settings (SGD).

Its step is proportional to the gradient, so that small errors stay small. Adam's is not.
"""
_WAVE_STEPS = 64


@dataclass(frozen=True, slots=True)
class How:
    """The settings of a model's run."""

    device: torch.device
    dtype: torch.dtype | None = None
    """None keeps the model's own."""
    train: bool = False
    """Train: forward, backward and an optimizer step; otherwise forward in evaluation mode."""
    wide: bool = False
    """Run in float64, from the weights and inputs of the narrower dtype."""
    seed: int = 0


class Execution:
    """A model that is ready to run."""

    def __init__(self, subject: Subject, how: How) -> None:
        self._how = how
        self.during: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
        """Context active while the model itself runs, not while weights or results are copied."""
        self._user_loss = subject.loss
        self._make_optimizer = subject.optimizer
        model = subject.model if how.dtype is None else subject.model.to(how.dtype)
        self._given = _each((subject.args, subject.kwargs), lambda t: _cast(t, how.dtype).detach().cpu().clone())
        self._kept = {name: t.detach().cpu().clone() for name, t in _state(model)}
        floats = [t.dtype for t in [*self._kept.values(), *_tensors(self._given)] if t.is_floating_point()]
        self._narrow = floats[0] if floats else torch.get_default_dtype()
        if how.wide:
            model = model.double()
        self._model = model.to(how.device).train(how.train)
        self._inputs: Any = None
        self._optimizer: Any = None
        self.learning = False
        """Whether the optimizer is making a step right now."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the model's weights before widening."""
        return self._narrow

    def run(self, move: int = 0) -> list[tuple[str, torch.Tensor]]:
        """Run from the start and return the resulting tensors by name.

        They are output, loss, gradients, buffers, and parameters after a step. ``move`` seeds a
        perturbation of weights and inputs by about a rounding step; 0 for none.
        """
        self.restore(move)
        output, loss = self.step()
        results = list(_named(output, "output"))
        if loss is not None:
            results += [(LOSS, loss)]
            results += [(f"gradient of {n}", p.grad) for n, p in self._model.named_parameters() if p.grad is not None]
            results += [(f"buffer {n}", b) for n, b in self._model.named_buffers()]
            results += [(f"{n} after a step", p) for n, p in self._model.named_parameters() if p.grad is not None]
        if not results:
            raise SubjectError("the model's output holds no tensor")
        return [(name, tensor.detach()) for name, tensor in results]

    def restore(self, move: int = 0) -> None:
        """Reset weights, buffers and inputs to their initial values."""
        perturb = _Perturbation(move)
        with torch.no_grad():
            for name, tensor in _state(self._model):
                tensor.copy_(perturb(self._kept[name]))
            self._inputs = _each(self._given, lambda t: self._ready(perturb(t)))
        self._optimizer = self._new_optimizer() if self._how.train else None

    def _new_optimizer(self) -> Any:
        """Return an optimizer that has made no step yet."""
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        if self._make_optimizer is None:
            return torch.optim.SGD(parameters, **_SGD_OPTIONS) if parameters else None
        optimizer = self._make_optimizer(parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise SubjectError(
                f"optimizer(parameters) returned {type(optimizer).__name__}, not a torch.optim.Optimizer"
            )
        return optimizer

    def _ready(self, tensor: torch.Tensor) -> torch.Tensor:
        widen = self._how.wide and tensor.is_floating_point()
        return tensor.to(device=self._how.device, dtype=torch.float64 if widen else tensor.dtype, copy=True)

    def step(self) -> tuple[Any, torch.Tensor | None]:
        """Run once on the current weights and inputs; return output, and loss in training."""
        how = self._how
        self._model.zero_grad(set_to_none=True)
        seed_generator(how.seed, how.device)
        args, kwargs = self._inputs
        wide = _in_float64(self._narrow) if how.wide else contextlib.nullcontext()
        with torch.set_grad_enabled(how.train), wide, self.during():
            output = self._model(*args, **kwargs)
            loss = self._loss_of(output) if how.train else None
            if loss is not None:
                loss.backward()
                self._learn()
            if how.device.type == "cuda":
                torch.cuda.synchronize()
        return output, loss

    def _learn(self) -> None:
        self.learning = True
        try:
            self._optimizer.step()
        finally:
            self.learning = False

    def _loss_of(self, output: Any) -> torch.Tensor:
        if self._user_loss is not None:
            loss = self._user_loss(output)
        elif isinstance(model_loss := getattr(output, "loss", None), torch.Tensor):
            loss = model_loss
        else:
            loss = _default_loss(output)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise SubjectError(f"the loss is {_kind(loss)}, not a tensor of one number")
        if not loss.requires_grad:
            raise SubjectError("the loss does not depend on any weight, so there is nothing to train")
        return loss


@contextlib.contextmanager
def _in_float64(narrow: torch.dtype) -> Iterator[None]:
    """Use float64 where no dtype is given or a narrower one is requested."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Wide(narrow):
            yield
    finally:
        torch.set_default_dtype(before)


class _Perturbation:
    """Perturbs the elements of floating-point tensors by about a rounding step of their dtype."""

    def __init__(self, move: int) -> None:
        self._generator = torch.Generator().manual_seed(move) if move else None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._generator is None or not tensor.is_floating_point():
            return tensor
        noise = torch.rand(tensor.shape, generator=self._generator, dtype=torch.float64).sub_(0.5).mul_(math.sqrt(12))
        return (tensor.double() * (1 + torch.finfo(tensor.dtype).eps * noise)).to(tensor.dtype)


def _state(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _each(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {name: _each(value, change) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        changed = [_each(value, change) for value in tree]
        return changed if isinstance(tree, list) else tuple(changed)
    return tree


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [tensor for _, tensor in _named(tree, "")]


def _named(tree: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an output by name; outputs of libraries are often custom mappings."""
    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _named(value, f"{name}[{key!r}]")
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from _named(value, f"{name}[{number}]")


def _default_loss(output: Any) -> torch.Tensor:
    """Return a loss that depends on every element differently.

    It is the mean of the output times a cosine, rounded to short numbers.
    """
    total = None
    for tensor in _tensors(output):
        if tensor.is_floating_point() and tensor.requires_grad:
            wave = np.round(np.cos(np.arange(tensor.numel())) * _WAVE_STEPS) / _WAVE_STEPS
            factors = torch.from_numpy(wave).to(device=tensor.device, dtype=tensor.dtype).reshape(tensor.shape)
            part = (tensor * factors).mean()
            total = part if total is None else total + part
    if total is None:
        raise SubjectError("no output of the model depends on a weight; define loss(output) beside model()")
    return total


def _kind(value: Any) -> str:
    return f"of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
