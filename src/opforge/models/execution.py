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

from opforge.models.model import LoadedModel, UnusableModelError
from opforge.models.widening import WideningMode
from opforge.runtime.trees import map_instances
from opforge.sandbox.guest.global_state import seed_generator

LOSS = "loss"
_SGD_OPTIONS = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.01}
"""Default optimizer settings (SGD).

Its step is proportional to the gradient, so that small errors stay small. Adam's is not.
"""
_WAVE_STEPS = 64


@dataclass(frozen=True, slots=True)
class ExecutionSettings:
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

    def __init__(self, subject: LoadedModel, settings: ExecutionSettings) -> None:
        self._settings = settings
        self.run_context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
        """Context active while the model itself runs, not while weights or results are copied."""
        self._user_loss = subject.loss
        self._make_optimizer = subject.optimizer
        model = subject.model if settings.dtype is None else subject.model.to(settings.dtype)
        self._initial_inputs = map_instances(
            (subject.args, subject.kwargs),
            torch.Tensor,
            lambda t: _cast(t, settings.dtype).detach().cpu().clone(),
        )
        self._initial_state = {name: t.detach().cpu().clone() for name, t in _state(model)}
        floats = [
            t.dtype for t in [*self._initial_state.values(), *_tensors(self._initial_inputs)] if t.is_floating_point()
        ]
        self._narrow = floats[0] if floats else torch.get_default_dtype()
        if settings.wide:
            model = model.double()
        self._model = model.to(settings.device).train(settings.train)
        self._inputs: Any = None
        self._optimizer: Any = None
        self.in_optimizer_step = False
        """Whether the optimizer is making a step right now."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the model's weights before widening."""
        return self._narrow

    def run(self, perturbation_seed: int = 0) -> list[tuple[str, torch.Tensor]]:
        """Run from the start and return the resulting tensors by name.

        They are output, loss, gradients, buffers, and parameters after a step. The seed is that of a
        perturbation of weights and inputs by about a rounding step; 0 for none.
        """
        self.restore(perturbation_seed)
        output, loss = self.run_once()
        results = list(_named_tensors(output, "output"))
        if loss is not None:
            results += [(LOSS, loss)]
            results += [(f"gradient of {n}", p.grad) for n, p in self._model.named_parameters() if p.grad is not None]
            results += [(f"buffer {n}", b) for n, b in self._model.named_buffers()]
            results += [(f"{n} after a step", p) for n, p in self._model.named_parameters() if p.grad is not None]
        if not results:
            raise UnusableModelError("the model's output holds no tensor")
        return [(name, tensor.detach()) for name, tensor in results]

    def restore(self, perturbation_seed: int = 0) -> None:
        """Reset weights, buffers and inputs to their initial values."""
        perturb = _Perturbation(perturbation_seed)
        with torch.no_grad():
            for name, tensor in _state(self._model):
                tensor.copy_(perturb(self._initial_state[name]))
            self._inputs = map_instances(self._initial_inputs, torch.Tensor, lambda t: self._to_device(perturb(t)))
        self._optimizer = self._new_optimizer() if self._settings.train else None

    def _new_optimizer(self) -> Any:
        """Return an optimizer that has made no step yet."""
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        if self._make_optimizer is None:
            return torch.optim.SGD(parameters, **_SGD_OPTIONS) if parameters else None
        optimizer = self._make_optimizer(parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UnusableModelError(
                f"optimizer(parameters) returned {type(optimizer).__name__}, not a torch.optim.Optimizer"
            )
        return optimizer

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        widen = self._settings.wide and tensor.is_floating_point()
        return tensor.to(device=self._settings.device, dtype=torch.float64 if widen else tensor.dtype, copy=True)

    def run_once(self) -> tuple[Any, torch.Tensor | None]:
        """Run once on the current weights and inputs; return output, and loss in training."""
        how = self._settings
        self._model.zero_grad(set_to_none=True)
        seed_generator(how.seed, how.device)
        args, kwargs = self._inputs
        wide = _in_float64(self._narrow) if how.wide else contextlib.nullcontext()
        with torch.set_grad_enabled(how.train), wide, self.run_context():
            output = self._model(*args, **kwargs)
            loss = self._loss_of(output) if how.train else None
            if loss is not None:
                loss.backward()
                self._optimizer_step()
            if how.device.type == "cuda":
                torch.cuda.synchronize()
        return output, loss

    def _optimizer_step(self) -> None:
        self.in_optimizer_step = True
        try:
            self._optimizer.step()
        finally:
            self.in_optimizer_step = False

    def _loss_of(self, output: Any) -> torch.Tensor:
        if self._user_loss is not None:
            loss = self._user_loss(output)
        elif isinstance(model_loss := getattr(output, "loss", None), torch.Tensor):
            loss = model_loss
        else:
            loss = _default_loss(output)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UnusableModelError(f"the loss is {_describe(loss)}, not a tensor of one number")
        if not loss.requires_grad:
            raise UnusableModelError("the loss does not depend on any weight, so there is nothing to train")
        return loss


@contextlib.contextmanager
def _in_float64(narrow: torch.dtype) -> Iterator[None]:
    """Use float64 where no dtype is given or a narrower one is requested."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with WideningMode(narrow):
            yield
    finally:
        torch.set_default_dtype(before)


class _Perturbation:
    """Perturbs the elements of floating-point tensors by about a rounding step of their dtype."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed) if seed else None

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


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [tensor for _, tensor in _named_tensors(tree, "")]


def _named_tensors(tree: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an output by name; outputs of libraries are often custom mappings."""
    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _named_tensors(value, f"{name}[{key!r}]")
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from _named_tensors(value, f"{name}[{number}]")


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
        raise UnusableModelError("no output of the model depends on a weight; define loss(output) beside model()")
    return total


def _describe(value: Any) -> str:
    return f"of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
