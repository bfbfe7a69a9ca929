"""Process that traces a program: ``python -m opforge.traces.child JSON FD``.

It runs the user's code, which may kill it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode

from opforge.errors import OpforgeError
from opforge.frames import is_user_file
from opforge.procs.child import open_messages, send
from opforge.traces.recorder import Recorder
from opforge.traces.stream import TargetError
from opforge.traces.targets import SCRIPT, Settings, Target

_FAKE_READ_REASON = "_local_scalar_dense.default: the program read a value, which is unknown with --fake; 0 was used"


def record_target(target: Target, settings: Settings, pipe: BinaryIO) -> None:
    """Run a target under a recorder, and send the recorded calls and any error of the target."""
    with pipe:
        recorder, guesses = Recorder(pipe, settings.device), _FakeReads()
        try:
            with _fake(guesses) if settings.fake else contextlib.nullcontext():
                action = _function_to_record(target, settings)
                with recorder.optimizer_steps(), recorder:
                    action()
        except SystemExit as exit_error:
            if code := _exit_code(exit_error):
                send(pipe, TargetError(f"the program exited with status {code}", exit_code=code).wire())
        except OpforgeError as error:
            send(pipe, TargetError(str(error), ours=True).wire())
        except BaseException as error:  # noqa: BLE001  # user code: any error ends the trace and is reported
            failure = TargetError(_error_message(error, settings), traceback=_user_traceback(error))
            send(pipe, failure.wire())
        finally:
            recorder.add_loss(_FAKE_READ_REASON, guesses.count)
            recorder.flush()


def _exit_code(error: SystemExit) -> int:
    """Return the exit code that Python would end with; as Python does, print what is no number."""
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1


@contextlib.contextmanager
def _fake(guesses: _FakeReads) -> Iterator[None]:
    """Use fake tensors, which have no contents."""
    with FakeTensorMode(allow_non_fake_inputs=True), guesses:
        yield


class _FakeReads(TorchDispatchMode):
    """Answers 0 when a program reads a value of a fake tensor, which has none, and counts it.

    It is entered after the mode of fake tensors.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler for the first mode, which takes seconds

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is not torch.ops.aten._local_scalar_dense.default:  # noqa: SLF001  # it has no public name
            return func(*args, **(kwargs or {}))
        try:
            return func(*args)
        except DataDependentOutputException:
            self.count += 1
            return _zero(args[0].dtype)


def _zero(dtype: torch.dtype) -> bool | int | float | complex:
    if dtype == torch.bool:
        return False
    if dtype.is_complex:
        return 0j
    return 0.0 if dtype.is_floating_point else 0


def _function_to_record(target: Target, settings: Settings) -> Callable[[], None]:
    """Return the function to record; an architecture's model is built here, before recording."""
    if target.is_architecture:
        from opforge.traces.architectures import model_runner

        return model_runner(target, settings)
    if target.kind == SCRIPT:
        return lambda: _script(target)
    return _function(target.name)


def _script(target: Target) -> None:
    sys.argv = [target.name, *target.args]
    sys.path.insert(0, str(Path(target.name).parent))
    runpy.run_path(target.name, run_name="__main__")


def _function(name: str) -> Callable[[], None]:
    sys.path.insert(0, str(Path.cwd()))
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # raised by an import inside the module
        raise OpforgeError(f"there is no module {module!r} in this folder or among the installed ones") from None
    except AttributeError:
        raise OpforgeError(f"module {module!r} has no function {attribute!r}") from None

    def call() -> None:
        result = function()
        if isinstance(result, Iterator):
            for _ in result:
                pass

    return call


def _user_traceback(error: BaseException) -> str:
    """Return the traceback of an error, without frames of torch, opforge or Python's ways to start a program."""
    summary = traceback.TracebackException.from_exception(error)
    frames = [frame for frame in summary.stack if is_user_file(frame.filename)]
    summary.stack = traceback.StackSummary.from_list(frames[-8:])
    return "".join(summary.format(chain=False))


def _error_message(error: BaseException, settings: Settings) -> str:
    first = (str(error).splitlines() or [""])[0]
    text = f"the program raised {type(error).__name__}: {first}"
    if settings.fake and type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException"):
        text += " (it reads tensor values, which do not exist with --fake)"
    return text


if __name__ == "__main__":
    messages = open_messages()
    given = json.loads(sys.argv[1])
    target = Target(given["kind"], given["name"], tuple(given["args"]))
    record_target(target, Settings(**given["settings"]), messages)
