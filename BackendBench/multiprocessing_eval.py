"""``MultiprocessingEvaluator``: ``eval_one_op`` for several operators. The judge always uses processes of its own."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch

from BackendBench.eval import CorrectnessTestResult, PerformanceTestResult, eval_one_op


@dataclass
class EvalResult:
    """The results of one task."""

    task_id: int
    correctness_score: float
    performance_score: torch.Tensor
    correctness_results: list[CorrectnessTestResult]
    performance_results: list[PerformanceTestResult]
    error: str | None = None


class MultiprocessingEvaluator:
    """Judges tasks one after another; a kernel that crashes or hangs affects its own task alone."""

    def __init__(self, num_workers: int = 1, daemon: bool = True) -> None:
        del num_workers, daemon  # one kernel is timed at a time, and every kernel has a process of its own
        self._tasks: list[tuple[Any, Any, list[Any], list[Any]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.shutdown()

    def submit_task(
        self, op: Any, impl: Any, correctness_tests: Iterable[Any], performance_tests: Iterable[Any]
    ) -> int:
        """Add a task and return its number."""
        self._tasks.append((op, impl, list(correctness_tests), list(performance_tests)))
        return len(self._tasks) - 1

    def start_evaluation(self) -> None:
        """Do nothing: tasks are judged when their results are wanted."""

    def get_results(self) -> list[EvalResult]:
        """Judge all tasks and return their results in order."""
        return [EvalResult(number, *eval_one_op(*task)) for number, task in enumerate(self._tasks)]

    def shutdown(self) -> None:
        """Forget the tasks."""
        self._tasks.clear()
