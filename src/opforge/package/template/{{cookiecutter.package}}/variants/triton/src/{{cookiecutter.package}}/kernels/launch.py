"""How kernels are started: on a GPU, or with Triton's interpreter (``TRITON_INTERPRET=1``), which runs them on the CPU."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels are interpreted. Triton decides it when a kernel is defined, which is when this package is imported."""


def operator(
    name: str, *, mutates: tuple[str, ...] = (), schema: str | None = None
) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as an operator; without a schema, its parameters and their types are the schema.

    On a GPU it is a ``triton_op``: torch.compile sees the kernels in it. Interpreted kernels cannot be compiled, so that
    it is a ``custom_op`` then, which torch.compile calls as it is.
    """
    make = torch.library.custom_op if INTERPRETED else torch.library.triton_op
    return make(name, mutates_args=mutates, schema=schema)


def wrap_triton(kernel: Any) -> Any:
    """Return a kernel as one that torch.compile can see.

    torch looks for calls of this name in an operator's source: what is compiled is made anew when the kernel changes.
    """
    return kernel if INTERPRETED else torch.library.wrap_triton(kernel)


def blocks(count: int, size: int) -> tuple[int]:
    """Return the grid of programs that work on this many elements, a block each."""
    return ((count + size - 1) // size,)


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Return the context in which kernels run where x is; an error where they cannot."""
    if x.device.type == "cuda":
        return torch.cuda.device(x.device)
    if x.device.type == "cpu" and not INTERPRETED:
        raise RuntimeError(
            "a Triton kernel was given a tensor on the CPU; move it to a GPU, or have kernels interpreted: set TRITON_INTERPRET=1 "
            "in the environment before {{ cookiecutter.package }} is imported (slow, for tests)"
        )
    return nullcontext()


def apart(x: Tensor, other: Tensor) -> Tensor:
    """Return another argument of a kernel that writes x: contiguous, and in memory of its own."""
    shared = torch._C._is_alias_of(x, other)
    return other.clone(memory_format=torch.contiguous_format) if shared else other.contiguous()


class _FirstConfig:
    """An autotuned kernel in the interpreter, where there is nothing to time: the first config that is left is taken."""

    def __init__(self, kernel: Any, configs: list[triton.Config], prune: Callable[..., list[triton.Config]]) -> None:
        self.kernel, self.configs, self.prune = kernel, configs, prune

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            named = dict(zip(self.kernel.arg_names, args, strict=False))
            chosen = self.prune(self.configs, named, **kwargs)[0]
            self.kernel[grid](*args, **kwargs, **chosen.kwargs)

        return run


def autotune(
    configs: list[triton.Config], key: list[str], prune: Callable[..., list[triton.Config]]
) -> Callable[[Any], Any]:
    """Have Triton time the configs that are left after pruning, once for each value of the arguments in key."""
    if INTERPRETED:
        return lambda kernel: _FirstConfig(kernel, configs, prune)
    return triton.autotune(configs=configs, key=key, prune_configs_by={"early_config_prune": prune})
