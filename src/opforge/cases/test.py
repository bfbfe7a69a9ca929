"""``Test``: one call with inputs made by callables, as users write it in ``gen_input.py``."""

from __future__ import annotations

from typing import Any

_PLAIN = (bool, int, float, complex, str, list, tuple, type(None))
_PLAIN_OF_TORCH = frozenset({"dtype", "device", "layout", "memory_format"})


class Test:
    """A call of plain values, and of zero-argument callables that make a new input each time."""

    __test__ = False  # not a pytest test

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for name, maker in [*enumerate(args), *kwargs.items()]:
            if not (callable(maker) or _is_plain(maker)):
                raise TypeError(
                    f"Test argument {name!r} is {type(maker).__name__}, neither a callable nor a plain value: "
                    "write a function that makes the input, for example `lambda: torch.randn(3)`"
                )
        self._args = args
        self._kwargs = kwargs

    @property
    def args(self) -> list[Any]:
        return [_made(maker) for maker in self._args]

    @property
    def kwargs(self) -> dict[str, Any]:
        return {name: _made(maker) for name, maker in self._kwargs.items()}

    def __repr__(self) -> str:
        return f"Test({len(self._args)} positional, {sorted(self._kwargs)} by name)"


def _is_plain(value: Any) -> bool:
    """Whether a value may be passed as it is: a call cannot change it, unlike a tensor."""
    kind = type(value)
    return isinstance(value, _PLAIN) or (kind.__module__ == "torch" and kind.__name__ in _PLAIN_OF_TORCH)


def _made(maker: Any) -> Any:
    return maker if _is_plain(maker) else maker()
