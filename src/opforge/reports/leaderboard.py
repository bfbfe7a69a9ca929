"""Leaderboard of many runs: for the terminal, as Markdown, as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.markup import escape

from opforge.reports.escape import markdown_code, one_line
from opforge.reports.speed_text import operator_fields, speed_cell
from opforge.reports.terminal import text_table
from opforge.runs.leaderboard import Board, Entry, Leaderboard
from opforge.runs.score import OperatorTally
from opforge.runs.speed import Ratio

_MAX_SHOWN_OPERATORS = 40
_COLUMNS = ("rank", "run", "backend", "correctness", "coverage", "geomean", "common", "perf@p")
SEPARATE_BOARDS_NOTE = "Runs on other cases or devices are listed separately: their scores cannot be compared."


def print_leaderboard(console: Console, leaderboard: Leaderboard) -> None:
    """Print all boards."""
    for board in leaderboard.boards:
        console.print(f"{escape(board.suite)}; {escape(board.device)}", soft_wrap=True, highlight=False)
        console.print(text_table(_COLUMNS, _rows(board, one_line)))
        console.print(_common_text(board, leaderboard.order), soft_wrap=True)
        console.print(
            text_table(("operator", *_names(board, one_line)), _operator_rows(board, one_line)[:_MAX_SHOWN_OPERATORS])
        )
        if len(board.operators) > _MAX_SHOWN_OPERATORS:
            console.print(f"… and {len(board.operators) - _MAX_SHOWN_OPERATORS} more operators; --format json has all")
        console.print()
    if len(leaderboard.boards) > 1:
        console.print(SEPARATE_BOARDS_NOTE, soft_wrap=True)
    for path, reason in leaderboard.excluded:
        console.print(f"left out: {escape(path)}: {escape(reason)}", soft_wrap=True)


def markdown(leaderboard: Leaderboard) -> str:
    """Return all boards as Markdown."""
    lines: list[str] = []
    for board in leaderboard.boards:
        lines += [f"### {markdown_code(board.suite)} on {markdown_code(board.device)}", ""]
        lines += _markdown_table(_COLUMNS, _rows(board, markdown_code))
        lines += ["", _common_text(board, leaderboard.order), "", "<details><summary>Operators</summary>", ""]
        lines += _markdown_table(("operator", *_names(board, markdown_code)), _operator_rows(board, markdown_code))
        lines += ["", "</details>", ""]
    lines += [SEPARATE_BOARDS_NOTE, ""] if len(leaderboard.boards) > 1 else []
    lines += [f"- left out: {markdown_code(path)}: {markdown_code(reason)}" for path, reason in leaderboard.excluded]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_table(titles: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *rows)]


def _names(board: Board, format_text: Callable[[str], str]) -> list[str]:
    return [format_text(entry.name) for entry in board.entries]


def _rows(board: Board, format_text: Callable[[str], str]) -> list[list[str]]:
    return [_row(rank, entry, format_text) for rank, entry in zip(board.ranks, board.entries, strict=True)]


def _row(rank: int, entry: Entry, format_text: Callable[[str], str]) -> list[str]:
    scores = entry.summary.scores()
    return [
        str(rank),
        format_text(entry.name),
        format_text(entry.manifest.backend),
        f"{scores['correctness']:.4f} ({scores['right']} of {scores['operators']} right)",
        f"{scores['coverage']:.4f}",
        _ratio(entry.score("performance")) + (f" (n={n})" if (n := scores["performance_operators"]) else ""),
        _ratio(entry.common),
        _ratio(entry.score("perf_at_p"), 2),
    ]


def _common_text(board: Board, order: str) -> str:
    ranked = f"ranked by {order}; runs with overlapping intervals share a rank"
    text = f"{ranked}; common: geomean over the {board.common} operators that are right and timed in every run"
    return f"{text}; {board.setting_differences}" if board.setting_differences else text


def _operator_rows(board: Board, format_text: Callable[[str], str]) -> list[list[str]]:
    served = [entry.tallies for entry in board.entries]
    return [[format_text(op), *(_cell(tallies.get(op)) for tallies in served)] for op in board.operators]


def _cell(tally: OperatorTally | None) -> str:
    """Return the result of an operator in a run."""
    if tally is None:
        return "–"
    return (speed_cell(tally) or "right") if tally.is_correct else f"{tally.passed}/{tally.total} passed"


def _ratio(ratio: Ratio | None, digits: int = 3) -> str:
    return "" if ratio is None else f"{ratio.value:.{digits}f} [{ratio.low:.{digits}f}, {ratio.high:.{digits}f}]"


def as_json(leaderboard: Leaderboard) -> dict[str, Any]:
    """Return all boards as data."""
    return {
        "order": leaderboard.order,
        "boards": [_board(board) for board in leaderboard.boards],
        "left_out": [{"run": path, "reason": reason} for path, reason in leaderboard.excluded],
    }


def _board(board: Board) -> dict[str, Any]:
    runs = [
        {
            "rank": rank,
            "run": entry.path,
            "name": entry.name,
            "backend": entry.manifest.backend,
            "torch": entry.manifest.versions["torch"],
            "common": None if entry.common is None else entry.common.value,
            "common_interval": None if entry.common is None else entry.common.interval,
            "scores": entry.summary.scores(),
            "operators": [_operator(op, entry) for op in board.operators],
        }
        for rank, entry in zip(board.ranks, board.entries, strict=True)
    ]
    return {
        "suite": board.suite,
        "suite_digest": board.digest,
        "device": board.device,
        "common_operators": board.common,
        "differing": board.setting_differences,
        "runs": runs,
    }


def _operator(op: str, entry: Entry) -> dict[str, Any]:
    tally = entry.tallies.get(op)
    counts = {"cases": tally.total, "passed": tally.passed, "speedup": tally.speedup} if tally else {}
    return {"op": op, "served": tally is not None, **counts, **(operator_fields(tally) if tally else {})}
