"""``torch.ops.{{ cookiecutter.package }}`` with types: what is registered, as editors and type checkers see it."""

from typing import Protocol, cast

import torch
from torch import Tensor


class Namespace(Protocol):
    """A method for each registered operator, with the parameters of its schema. `opforge add-op` extends it."""

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor: ...
    def swiglu_backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]: ...
    def row_moments(self, x: Tensor) -> tuple[Tensor, Tensor]: ...
    def add_scaled_(self, x: Tensor, y: Tensor, alpha: float = ...) -> None: ...
    def rms_norm(self, x: Tensor, weight: Tensor | None = ..., eps: float = ...) -> Tensor: ...


ops = cast("Namespace", torch.ops.{{ cookiecutter.package }})
