"""Leaderboard of many runs: for the terminal, as Markdown, as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.markup import escape

from opforge.reports.plain import code, one_line
from opforge.reports.speed import operator_fields, speed_cell
from opforge.reports.terminal import plain_table
from opforge.runs.leaderboard import Board, Entry, Leaderboard
from opforge.runs.score import OperatorTally
from opforge.runs.speed import Ratio

_MAX_SHOWN_OPERATORS = 40
_COLUMNS = ("rank", "run", "backend", "correctness", "coverage", "geomean", "common", "perf@p")
APART = "Runs on other cases or another device stand on boards of their own: their scores cannot be compared."


def show(console: Console, found: Leaderboard) -> None:
    """Print all boards."""
    for board in found.boards:
        console.print(f"{escape(board.suite)}; {escape(board.device)}", soft_wrap=True, highlight=False)
        console.print(plain_table(_COLUMNS, _rows(board, one_line)))
        console.print(_common_text(board, found.order), soft_wrap=True)
        console.print(
            plain_table(("operator", *_names(board, one_line)), _operator_rows(board, one_line)[:_MAX_SHOWN_OPERATORS])
        )
        if len(board.operators) > _MAX_SHOWN_OPERATORS:
            console.print(f"… and {len(board.operators) - _MAX_SHOWN_OPERATORS} more operators; --format json has all")
        console.print()
    if len(found.boards) > 1:
        console.print(APART, soft_wrap=True)
    for path, reason in found.left_out:
        console.print(f"left out: {escape(path)}: {escape(reason)}", soft_wrap=True)


def markdown(found: Leaderboard) -> str:
    """Return all boards as Markdown."""
    lines: list[str] = []
    for board in found.boards:
        lines += [f"### {code(board.suite)} on {code(board.device)}", ""]
        lines += _markdown_table(_COLUMNS, _rows(board, code))
        lines += ["", _common_text(board, found.order), "", "<details><summary>Operators</summary>", ""]
        lines += _markdown_table(("operator", *_names(board, code)), _operator_rows(board, code))
        lines += ["", "</details>", ""]
    lines += [APART, ""] if len(found.boards) > 1 else []
    lines += [f"- left out: {code(path)}: {code(reason)}" for path, reason in found.left_out]
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
        format_text(entry.manifest["config"]["backend"]),
        f"{scores['correctness']:.4f} ({scores['right']} of {scores['operators']} right)",
        f"{scores['coverage']:.4f}",
        _ratio(entry.score("performance")) + (f" (n={n})" if (n := scores["performance_operators"]) else ""),
        _ratio(entry.common),
        _ratio(entry.score("perf_at_p"), 2),
    ]


def _common_text(board: Board, order: str) -> str:
    ranked = f"ranked by {order}, a rank being shared where intervals overlap"
    text = f"{ranked}; common: geomean over the {board.common} operators that every run has right and timed"
    return f"{text}; {board.differing}" if board.differing else text


def _operator_rows(board: Board, format_text: Callable[[str], str]) -> list[list[str]]:
    served = [entry.served for entry in board.entries]
    return [[format_text(op), *(_cell(tallies.get(op)) for tallies in served)] for op in board.operators]


def _cell(tally: OperatorTally | None) -> str:
    """Return the result of an operator in a run."""
    if tally is None:
        return "–"
    return (speed_cell(tally) or "right") if tally.right else f"{tally.passed}/{tally.total} passed"


def _ratio(ratio: Ratio | None, digits: int = 3) -> str:
    return "" if ratio is None else f"{ratio.value:.{digits}f} [{ratio.low:.{digits}f}, {ratio.high:.{digits}f}]"


def as_json(found: Leaderboard) -> dict[str, Any]:
    """Return all boards as data."""
    return {
        "order": found.order,
        "boards": [_board(board) for board in found.boards],
        "left_out": [{"run": path, "reason": reason} for path, reason in found.left_out],
    }


def _board(board: Board) -> dict[str, Any]:
    runs = [
        {
            "rank": rank,
            "run": entry.path,
            "name": entry.name,
            "backend": entry.manifest["config"]["backend"],
            "torch": entry.manifest["versions"]["torch"],
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
        "differing": board.differing,
        "runs": runs,
    }


def _operator(op: str, entry: Entry) -> dict[str, Any]:
    tally = entry.served.get(op)
    counts = {"cases": tally.total, "passed": tally.passed, "speedup": tally.speedup} if tally else {}
    return {"op": op, "served": tally is not None, **counts, **(operator_fields(tally) if tally else {})}
