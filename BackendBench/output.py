"""Save results of ``eval`` in the four files that BackendBench writes. `opforge run` writes them itself."""

import csv
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from BackendBench.eval import CorrectnessTestResult, PerformanceTestResult

_Correct = Sequence[CorrectnessTestResult]
_Timed = Sequence[PerformanceTestResult]
_Rows = list[dict[str, Any]]


def save_results(
    correctness_results: _Correct,
    performance_results: _Timed,
    output_path: str | Path,
    command: str,
    mean_correctness: float,
    geomean_perf: float,
    perf_at_p_score: float,
    p: float = 1.0,
) -> None:
    """Write full_results.json, operator_summary.csv, failed_tests.json and OVERALL_SUMMARY.md."""
    folder = Path(output_path)
    folder.mkdir(parents=True, exist_ok=True)
    results, failed, summaries = _prepare_results_data(correctness_results, performance_results)
    (folder / "full_results.json").write_text(json.dumps(results, indent=2), encoding="utf-8")
    (folder / "failed_tests.json").write_text(json.dumps(failed, indent=2), encoding="utf-8")
    if summaries:
        rows = list(summaries.values())
        with (folder / "operator_summary.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    save_overall_summary(
        folder, command, mean_correctness, geomean_perf, perf_at_p_score, p, performance_results, correctness_results
    )
    sys.stdout.write(f"results saved to {folder.resolve()}\n")


def save_overall_summary(
    output_path: str | Path,
    command: str,
    mean_correctness: float,
    geomean_perf: float,
    perf_at_p_score: float,
    p: float = 1.0,
    performance_results: _Timed = (),
    correctness_results: _Correct = (),
) -> None:
    """Write OVERALL_SUMMARY.md: the command, the scores and a line for each operator."""
    lines = [
        "# BackendBench Run Summary",
        f"\n    {command}\n",
        "| Metric | Value |",
        "|---|---|",
        f"| Correctness Score | {mean_correctness:.2f} |",
        f"| Performance Score (geomean speedup) | {geomean_perf:.2f} |",
        f"| Perf@{p} Score | {perf_at_p_score:.2f} |",
        "\n| Operator | Correct | Speedup |",
        "|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in _get_summary_op_results(performance_results, correctness_results)),
    ]
    folder = Path(output_path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "OVERALL_SUMMARY.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _prepare_results_data(correctness: _Correct, performance: _Timed) -> tuple[_Rows, _Rows, dict[str, dict[str, Any]]]:
    """Return all results, the failed ones, and a summary of each operator."""
    failed = [asdict(r) for r in correctness if not r.is_correct]
    failed += [asdict(r) for r in performance if not r.successfully_ran]
    ops = _names(correctness, performance)
    summaries = {
        op: _summary(
            op, len(ops), [r for r in correctness if r.op_name == op], [r for r in performance if r.op_name == op]
        )
        for op in ops
    }
    return _sorted(asdict(r) for r in (*correctness, *performance)), _sorted(failed), summaries


def _summary(op: str, operator_count: int, correctness: _Correct, performance: _Timed) -> dict[str, Any]:
    right = sum(r.is_correct for r in correctness)
    ran = sum(r.successfully_ran for r in performance)
    speedups = [float(r.speedup) for r in performance if r.speedup]
    measured = [r for r in correctness if r.max_abs_error and r.max_rel_error]
    return {
        "operator": op,
        "total_tests": operator_count,  # BackendBench counts operators here
        "correctness_tests": len(correctness),
        "performance_tests": len(performance),
        "passed_correctness_tests": right,
        "passed_performance_tests": ran,
        "failed_correctness_tests": len(correctness) - right,
        "failed_performance_tests": len(performance) - ran,
        "correctness_rate": right / len(correctness) if correctness else 0.0,
        "avg_speedup": fmean(speedups) if speedups else 0.0,
        "geomean_speedup": _geometric_mean(speedups) if speedups else 0.0,
        "max_absolute_error": max((float(r.max_abs_error) for r in measured), default=0.0),
        "max_relative_error": max((float(r.max_rel_error) for r in measured), default=0.0),
    }


def _get_summary_op_results(performance: _Timed, correctness: _Correct) -> list[tuple[str, str, str]]:
    """Return operator, share of right tests and speedup as text, the fastest first; a failed race counts as 1."""
    rows = []
    for op in _names(correctness, performance):
        right = [r.is_correct for r in correctness if r.op_name == op]
        speedups = [(r.speedup or 1.0) if r.successfully_ran else 1.0 for r in performance if r.op_name == op]
        share = f"{100 * sum(right) / len(right):.4f}%" if right else "N/A"
        rows.append((op, share, f"{_geometric_mean(speedups):.4f}x" if speedups else "N/A"))
    return sorted(rows, key=lambda row: (row[2], row[1]), reverse=True)


def _geometric_mean(values: Sequence[float]) -> float:
    return torch.tensor(values).log().mean().exp().item()  # in float32, as BackendBench's


def _names(correctness: _Correct, performance: _Timed) -> list[str]:
    return list(dict.fromkeys(r.op_name for r in (*correctness, *performance)))


def _sorted(rows: Iterable[dict[str, Any]]) -> _Rows:
    return sorted(rows, key=lambda row: (row["op_name"], row["args"]))
