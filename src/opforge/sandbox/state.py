"""The global state of torch that a kernel must leave alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class GlobalState:
    """A reading of it."""

    default_dtype: torch.dtype
    threads: int
    grad_mode: bool
    inference_mode: bool
    deterministic: bool
    matmul_precision: str
    rng: bytes

    @classmethod
    def now(cls) -> GlobalState:
        return cls(
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.get_rng_state().numpy().tobytes(),
        )

    def changes_since(self, before: GlobalState, *, rng: bool) -> list[str]:
        """Say what differs from an earlier reading; the random state only where the operator is not random."""
        names = [n for n in self.__slots__ if n != "rng" and getattr(self, n) != getattr(before, n)]
        changes = [f"{n}: {getattr(before, n)} became {getattr(self, n)}" for n in names]
        if rng and self.rng != before.rng:
            changes.append("the random number generator was advanced")
        return changes

    def restore(self) -> None:
        """Put the state back, so that the next case starts clean."""
        torch.set_default_dtype(self.default_dtype)
        torch.set_num_threads(self.threads)
        torch.set_grad_enabled(self.grad_mode)
        if torch.are_deterministic_algorithms_enabled() != self.deterministic:
            torch.use_deterministic_algorithms(self.deterministic)  # loads a compiler, seconds of it
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.set_rng_state(torch.frombuffer(bytearray(self.rng), dtype=torch.uint8))
