"""Judge an implementation of an operator: in opforge's processes, by opforge's judge.

Nothing that is judged runs in this process. ``impl`` may be ATen's own operator, a kernel of a backend, or a Python
function; a function is judged from its source, in a copy of its own.
"""

import atexit
import contextlib
import functools
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from BackendBench.opregistry import name_of
from BackendBench.sources import kernel_of
from BackendBench.suite.base import OpTest
from BackendBench.utils import serialize_args
from opforge.backends.single import SingleBackend
from opforge.cases import Phase
from opforge.models.judge import MODEL_ROLES
from opforge.runs import RunConfig, run
from opforge.runs.config import DEFAULT_RACE_S
from opforge.runs.execute.judge_pool import device_settings
from opforge.runs.rows import ResultRow
from opforge.runtime.trees import instances
from opforge.sandbox.host.client import SERVER_VARIABLE
from opforge.sandbox.host.warm import warm_server
from opforge.suites.live import LiveCases

_WARM_UP_CALLS = 10
_USERS_SERVER = os.environ.get(SERVER_VARIABLE)


@dataclass
class CorrectnessTestResult:
    """The verdict of a test; ``error_type`` is the kind of opforge's verdict, ``error_msg`` its reason."""

    op_name: str
    args: str
    is_correct: bool = False
    error_msg: str = ""
    error_type: str = ""
    traceback: str = ""
    max_abs_error: float = -math.inf
    max_rel_error: float = -math.inf
    test_type: str = "correctness"


@dataclass
class PerformanceTestResult:
    """The times of a test: medians in milliseconds, and how many times as fast as ATen the kernel is."""

    op_name: str
    args: str
    speedup: float | None
    benchmark_time_ms: float | None
    reference_time_ms: float | None
    error_msg: str = ""
    successfully_ran: bool = False
    test_type: str = "performance"


_Judged = tuple[list[CorrectnessTestResult], list[PerformanceTestResult]]


def eval_one_op(
    op: Any, impl: Any, correctness_tests: Iterable[Any], performance_tests: Iterable[Any]
) -> tuple[float, torch.Tensor, list[CorrectnessTestResult], list[PerformanceTestResult]]:
    """Return correctness score, performance score and the results of all tests."""
    correctness, performance = _judge(op, impl, list(correctness_tests), list(performance_tests))
    return _score(correctness), _speed(performance), correctness, performance


def eval_correctness(op: Any, impl: Any, tests: Iterable[Any]) -> tuple[float, list[CorrectnessTestResult]]:
    """Return the share of tests that pass, and their results."""
    correctness, _ = _judge(op, impl, list(tests), [])
    return _score(correctness), correctness


def eval_correctness_test(op: Any, impl: Any, test: Any) -> CorrectnessTestResult:
    """Return the result of one test."""
    (result,) = eval_correctness(op, impl, [test])[1]
    return result


def eval_performance(op: Any, impl: Any, tests: Iterable[Any]) -> tuple[torch.Tensor, list[PerformanceTestResult]]:
    """Return the geometric mean of the speedups, and the results of the tests. Wrong kernels are not timed."""
    _, performance = _judge(op, impl, [], list(tests))
    return _speed(performance), performance


def perf_at_p(correctness: Sequence[Any], performance: Sequence[Any], p: float = 1.0) -> torch.Tensor:
    """Return the share of operators that are right and more than ``p`` times as fast."""
    fast = [bool(right) and float(speed) > p for right, speed in zip(correctness, performance, strict=True)]
    return torch.tensor(fast, dtype=torch.float32).mean()


def allclose(a: Any, b: Any, atol: float = 1e-2, rtol: float = 1e-2) -> bool:
    """Whether two results agree within tolerances. The judge's error bound is stricter and does not use this."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(allclose(x, y, atol, rtol) for x, y in zip(a, b, strict=True))
    if not isinstance(a, torch.Tensor):
        return bool(a == b)
    with contextlib.suppress(AssertionError, TypeError):
        torch.testing.assert_close(a, b, atol=atol, rtol=rtol, equal_nan=True)
        return True
    return False


def cpu_bench(fn: Callable[[], Any], num_runs: int = 100) -> float:
    """Return the mean seconds of a call, after ten more. The judge times in its own processes and does not use this."""
    for _ in range(_WARM_UP_CALLS):
        fn()
    began = time.perf_counter()
    for _ in range(num_runs):
        fn()
    return (time.perf_counter() - began) / num_runs


def format_exception(e: BaseException, op: Any, args: Any, kwargs: Any, traceback: str | None = None) -> str:
    """Return a message with operator, arguments, error and traceback."""
    name = getattr(op, "__name__", op)
    return f"{name} raised with {serialize_args(args, kwargs)}: {type(e).__name__}: {e}\n{traceback or ''}"


def live_cases(folder: Path, suite: Iterable[Any]) -> tuple[LiveCases, str, list[tuple[str, str]]]:
    """Return the tests of operators as cases, the device of their tensors, and each test's case id and text."""
    tests = [
        (name_of(op.op), phase, test.args, test.kwargs)
        for op in suite
        for phase, tests in ((Phase.CORRECTNESS, op.correctness_tests), (Phase.PERFORMANCE, op.performance_tests))
        for test in tests
    ]
    devices = {str(t.device) for *_, args, kwargs in tests for t in instances((args, kwargs), torch.Tensor)} - {"cpu"}
    device = min(devices, default="cpu")
    live = LiveCases(folder, device)
    ids = [(live.add(name, args, kwargs, phase), serialize_args(args, kwargs)) for name, phase, args, kwargs in tests]
    return live, device, ids


def _judge(op: Any, impl: Any, correctness: list[Any], performance: list[Any]) -> _Judged:
    if not (correctness or performance):
        return [], []
    label = getattr(op, "__name__", str(op))
    with tempfile.TemporaryDirectory(prefix="opforge-eval-") as temporary:
        folder = Path(temporary)
        kernel = kernel_of(impl, name_of(op), folder)
        live, device, ids = live_cases(folder, [OpTest(op, correctness, performance)])
        config = RunConfig("given", "kernel", device=device, race_s=_race_seconds(), workers=1)
        start_server(device)
        result = run(config, folder / "run", suite=live.suite(), backend=SingleBackend(kernel))
        rows = {row.id: row for row in result.store.rows()}
    judged = [(text, rows[id_]) for id_, text in ids]
    count = len(correctness)
    return (
        [_correctness(label, text, row) for text, row in judged[:count]],
        [_performance(label, text, row) for text, row in judged[count:]],
    )


def _race_seconds() -> float:
    return float(os.environ.get("OPFORGE_RACE_SECONDS", DEFAULT_RACE_S))


def _correctness(op_name: str, args: str, row: ResultRow) -> CorrectnessTestResult:
    if row.verdict == "passed":
        return CorrectnessTestResult(op_name, args, is_correct=True, max_abs_error=row.kernel_error or 0.0)
    error = -math.inf if row.kernel_error is None else row.kernel_error
    return CorrectnessTestResult(op_name, args, False, row.reason, row.verdict, max_abs_error=error)


def _performance(op_name: str, args: str, row: ResultRow) -> PerformanceTestResult:
    times = row.headline
    if row.verdict != "passed" or times is None:
        reason = "; ".join(filter(None, (f"{row.verdict}: {row.reason}" if row.reason else "not timed", *row.notes)))
        return PerformanceTestResult(op_name, args, None, None, None, reason)
    kernel, aten = (None if us is None else us / 1e3 for us in (times.kernel_us, times.aten_us))
    return PerformanceTestResult(op_name, args, times.speedup, kernel, aten, successfully_ran=True)


def _score(results: Sequence[CorrectnessTestResult]) -> float:
    return sum(result.is_correct for result in results) / len(results) if results else 0.0


def _speed(results: Sequence[PerformanceTestResult]) -> torch.Tensor:
    """Return the geometric mean of the speedups; a test that could not be timed counts as 1."""
    return torch.tensor([result.speedup or 1.0 for result in results]).log().mean().exp()


def start_server(device: str) -> None:
    """Have judges start from one fork server per kind of device: it imports torch, which takes seconds."""
    if _USERS_SERVER is None:
        os.environ[SERVER_VARIABLE] = _server(device.partition(":")[0])


@functools.cache
def _server(kind: str) -> str:
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    path, _process = stack.enter_context(warm_server("", MODEL_ROLES, device_settings(kind)))
    return path
