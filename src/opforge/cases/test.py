"""``Test``: one call whose inputs are made by callables, as users write it in ``gen_input.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Test:
    """A call: every argument is a zero-argument callable that makes the input anew each time it is asked."""

    __test__ = False  # not a test of pytest's

    def __init__(self, *args: Callable[[], Any], **kwargs: Callable[[], Any]) -> None:
        for name, maker in [*enumerate(args), *kwargs.items()]:
            if not callable(maker):
                raise TypeError(
                    f"Test argument {name!r} is {type(maker).__name__}, not a callable: "
                    "write a function that makes the input, for example `lambda: torch.randn(3)`"
                )
        self._args = args
        self._kwargs = kwargs

    @property
    def args(self) -> list[Any]:
        return [maker() for maker in self._args]

    @property
    def kwargs(self) -> dict[str, Any]:
        return {name: maker() for name, maker in self._kwargs.items()}

    def __repr__(self) -> str:
        return f"Test({len(self._args)} positional, {sorted(self._kwargs)} by name)"
