"""User options for a run in which language models write the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opforge import registry
from opforge.errors import OpforgeError, UnknownNameError, check_range

DSLS = {"triton": ".py", "helion": ".py", "cutedsl": ".py", "pytorch": ".py", "cpp": ".cpp", "cuda": ".cu"}
"""Languages for kernels, with their file suffixes."""
MAX_REPLY_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """Options for asking a model for kernels."""

    provider: str = "anthropic"
    model: str = "claude-opus-5-5"
    url: str = ""
    """Address of the server; empty for the provider's own."""
    transcript: str = ""
    """File to replay, for provider ``transcript``."""
    record: str = ""
    """File to record requests and replies to."""
    dsl: str = "triton"
    workers: int = 1
    """Number of independent workers per operator."""
    rounds: int = 5
    """Number of attempts per worker."""
    target: float | None = None
    """Speedup at which a kernel is fast enough; None to take the best of all attempts."""
    parallel: int = 8
    """Number of workers active at once, over all operators."""
    max_cost: float | None = None
    max_tokens: int | None = None
    reply_tokens: int = 16384
    """Maximum tokens of one reply."""
    prompts: str = ""
    """Folder with the user's templates."""
    prices: str = ""
    """File with the user's prices."""

    def checked(self, device: str) -> GenerationOptions:
        """Return the options; raise if one is out of range."""
        if self.dsl not in DSLS:
            raise UnknownNameError("DSL", self.dsl, DSLS)
        if self.dsl in ("cuda", "cutedsl") and device == "cpu":
            raise OpforgeError(
                f"--dsl {self.dsl} requires --device cuda; for the CPU use: cpp, triton, helion, pytorch"
            )
        if self.provider not in registry.names("providers"):
            raise UnknownNameError("provider", self.provider, registry.names("providers"))
        for name, value, highest in (
            ("workers", self.workers, 64),
            ("rounds", self.rounds, 1000),
            ("parallel", self.parallel, 256),
        ):
            check_range(_OPTION_NAMES[name], value, 1, highest)
        for name, number, limits in (
            ("target", self.target, (0.001, 1000)),
            ("max_cost", self.max_cost, (0.000_001, 1_000_000)),
            ("max_tokens", self.max_tokens, (1, 10**12)),
        ):
            if number is not None:
                check_range(_OPTION_NAMES[name], number, *limits)
        check_range("--reply-tokens", self.reply_tokens, 256, MAX_REPLY_TOKENS)
        if self.prompts and not Path(self.prompts).is_dir():
            raise OpforgeError(
                f"--prompts {self.prompts!r} is not a folder; see docs/generation.md for what it may hold"
            )
        return self

    @property
    def spending_limits(self) -> dict[str, float | None]:
        """Spending limits."""
        return {"max_cost": self.max_cost, "max_tokens": self.max_tokens}

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> GenerationOptions:
        return cls(**row)


_OPTION_NAMES = {
    "workers": "--kernel-agent-workers",
    "rounds": "the number of attempts (--llm-attempts, --kernel-agent-max-rounds)",
    "parallel": "--parallel",
    "target": "--kernel-agent-target",
    "max_cost": "--max-cost",
    "max_tokens": "--max-tokens",
}
