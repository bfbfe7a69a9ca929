"""Warn once, at the first compilation, that Inductor's code does not call enabled kernels."""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from .dispatch import KernelWarning

_MESSAGE = (
    "torch.compile is used while kernels are enabled: code from Inductor calls its own kernels instead of these, "
    "except for operators that it leaves to ATen (mm.out, addmm.out). Results are right; the kernels are bypassed"
)
_state: dict[str, Any] = {"compile": None, "ours": None, "said": False}
_lock = threading.Lock()


def watch_compilation(*, on: bool) -> None:
    """Start or stop watching for compilation."""
    with _lock:
        if on and "torch._dynamo" in sys.modules:
            _register_callback()
        elif on and _state["compile"] is None:
            _state["compile"] = torch.compile
            torch.compile = _state["ours"] = _wrapped(torch.compile)
        elif not on:
            _stop_watching()


def _wrapped(compile_: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compile_)
    def compile(*args: Any, **kwargs: Any) -> Any:  # noqa: A001  # torch's own name for it
        import torch._dynamo  # noqa: F401

        with _lock:
            if _state["compile"] is not None:
                _register_callback()
        return compile_(*args, **kwargs)

    return compile


def _register_callback() -> None:
    from torch._dynamo.callback import callback_handler

    if _warn_once not in callback_handler.start_callbacks:  # torch._dynamo.reset() forgets them
        callback_handler.register_start_callback(_warn_once)


def _stop_watching() -> None:
    if _state["compile"] is not None:
        if torch.compile is _state["ours"]:  # the program may have replaced it meanwhile
            torch.compile = _state["compile"]
        _state["compile"] = _state["ours"] = None
    if "torch._dynamo" in sys.modules:
        from torch._dynamo.callback import callback_handler

        if _warn_once in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(_warn_once)
    _state["said"] = False


def _warn_once(*_args: Any) -> None:
    if not _state["said"]:
        _state["said"] = True
        warnings.warn(_MESSAGE, KernelWarning, stacklevel=2)
