"""A run on the terminal: a table of operators, the reasons for failures, the scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from opforge.judge.verdict import VerdictKind
from opforge.reports import implementations, speed_text
from opforge.reports.escape import escape_controls, indented_line
from opforge.reports.run_files import verdict_counts_text, weak_text
from opforge.runs.manifest import Manifest
from opforge.runs.score import OperatorTally, Summary

_NON_TERMINAL_COLUMNS = 140
_MAX_OPERATOR_ROWS = 40
_MAX_FAILED_OPERATORS = 25
_MAX_WEAK_OPERATORS = 5
_MAX_ALARMS = 25
_MAX_NOT_REPLAYED = 4
_SPEED_COLUMNS: dict[str, Callable[[OperatorTally], str]] = {
    "× ATen": speed_text.speed_cell,
    "call × ATen": speed_text.call_cell,
    "% SOL": speed_text.sol_cell,
    "": speed_text.timing_remarks,
}
"""Speed columns by title; empty columns are left out. Speed of light: the kernel's, then ATen's."""


class EscapingConsole(Console):
    """Shows control characters as numbers, and emoji codes literally.

    A kernel's text must not change what is shown.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(escape_controls(part) if isinstance(part, str) else part for part in objects), **options)


def console_for_results() -> Console:
    """Return a console on stdout; a wide one if it is not a terminal."""
    console = EscapingConsole()
    return console if console.is_terminal else EscapingConsole(width=_NON_TERMINAL_COLUMNS)


def escape_line(text: str) -> str:
    """Return untrusted text, escaped for a line of console markup."""
    return escape(indented_line(text))


def text_table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """Return a table of texts, escaped so that they are shown as they are."""
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(escape(title), overflow="fold")
    for row in rows:
        table.add_row(*(escape(escape_controls(cell)) for cell in row))
    return table


def print_run(console: Console, manifest: Manifest, summary: Summary) -> None:
    """Print a run."""
    tallies = sorted(summary.judged, key=lambda t: (t.is_correct, t.op))
    if summary.separate_kernels:
        console.print(_comparison(manifest, summary))
    else:
        console.print(_table(manifest, tallies[:_MAX_OPERATOR_ROWS]))
    if len(tallies) > _MAX_OPERATOR_ROWS and not summary.separate_kernels:
        hidden = tallies[_MAX_OPERATOR_ROWS:]
        console.print(
            f"… and {len(hidden)} more operators, {sum(1 for t in hidden if t.is_correct)} of them right; all are in "
            "operator_summary.csv"
        )
    _show_reasons(console, [t for t in tallies if not t.is_correct])
    if summary.declined:
        console.print(f"declined (not counted as covered): {', '.join(summary.declined)}")
    for kernel in manifest.plan.kernels:
        if kernel.hints and any(not t.is_correct for t in tallies if t.op in kernel.ops):
            console.print(f"[yellow]hint[/yellow] {escape_line(kernel.name)} {escape_line('; '.join(kernel.hints))}")
    proof_remarks = manifest.proofs.remarks.values() if manifest.proofs is not None else ()
    for remark in (*manifest.plan.remarks, *proof_remarks):
        console.print(f"[yellow]note[/yellow] {escape_line(remark)}")
    if (losses := manifest.plan.losses) and not manifest.config["ops"]:
        console.print(f"{len(losses)} kinds of samples could not be converted to cases; see OVERALL_SUMMARY.md")
    for remark in speed_text.machine_notes(summary):
        console.print(f"[yellow]machine[/yellow] {escape(remark)}", soft_wrap=True)
    _show_weak(console, summary)
    _show_alarms(console, summary)
    _show_scores(console, summary)
    if manifest.activity is not None and manifest.activity.gpu_busy is not None:
        console.print(f"workers      {manifest.activity}", soft_wrap=True)


def _show_weak(console: Console, summary: Summary) -> None:
    weak = sorted(summary.weak_judged.items())
    if not weak:
        return
    shown = "; ".join(f"{op} ({', '.join(mutants)})" for op, mutants in weak[:_MAX_WEAK_OPERATORS])
    remainder = (
        f"; and {len(weak) - _MAX_WEAK_OPERATORS} more in OVERALL_SUMMARY.md" if len(weak) > _MAX_WEAK_OPERATORS else ""
    )
    console.print(f"[yellow]weak cases[/yellow]   {weak_text(summary)} {shown}{remainder}", soft_wrap=True)


def _table(manifest: Manifest, tallies: list[OperatorTally]) -> Table:
    table = _titled_table(manifest, "kernel")
    speeds = {title: cell for title, cell in _SPEED_COLUMNS.items() if any(cell(t) for t in tallies)}
    for title in speeds:
        table.add_column(title, justify="right" if title else "left")
    for tally in tallies:
        style = "bold red" if tally.alarms else None
        table.add_row(*_first_cells(tally), *[escape(cell(tally)) for cell in speeds.values()], style=style)
    return table


def _comparison(manifest: Manifest, summary: Summary) -> Table:
    """Return the table of custom operators, with the implementations of each one together."""
    rows = implementations.compare_implementations(manifest, summary)
    cells: dict[str, Callable[[implementations.Implementation], str]] = {
        "× reference": lambda row: speed_text.speed_cell(row.tally),
        "× fastest": lambda row: row.fastest_cell,
        "": lambda row: speed_text.timing_remarks(row.tally),
        "reference": lambda row: row.reference,
    }
    table = _titled_table(manifest, "implementation")
    shown = {title: cell for title, cell in cells.items() if any(cell(row) for row in rows)}
    for title in shown:
        table.add_column(title, justify="right" if title.startswith("×") else "left")
    for row in rows:
        style = "bold red" if row.tally.alarms else None
        table.add_row(*_first_cells(row.tally), *[escape(cell(row)) for cell in shown.values()], style=style)
    return table


def _titled_table(manifest: Manifest, kernel: str) -> Table:
    """Return a table with its title and first columns."""
    table = Table(
        title=f"{manifest.backend} on {manifest.suite} ({manifest.device})",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("operator", no_wrap=True)
    table.add_column(kernel, overflow="fold")
    table.add_column("passed", justify="right")
    table.add_column("verdict")
    return table


def _first_cells(tally: OperatorTally) -> list[str]:
    colour = "green" if tally.is_correct else "red"
    return [
        escape_line(tally.op),
        escape_line(tally.kernel).replace("::", ":\\:"),  # cells are folded, and no line may begin with a command
        f"{tally.passed}/{tally.total}",
        f"[{colour}]{_verdict_counts(tally)}[/{colour}]",
    ]


def _verdict_counts(tally: OperatorTally) -> str:
    if tally.is_correct:
        return "passed"
    return ", ".join(
        f"{tally.verdicts[o]} {o}" for o in VerdictKind if o is not VerdictKind.PASSED and tally.verdicts[o]
    )


def _show_alarms(console: Console, summary: Summary) -> None:
    alarms = list(speed_text.alarm_lines(summary))
    for who, alarm, case in alarms[:_MAX_ALARMS]:
        console.print(f"[bold red]ALARM[/bold red] {escape_line(who)}: {escape_line(alarm)}", soft_wrap=True)
        console.print(f"  {escape_line(case)}", soft_wrap=True)
    if len(alarms) > _MAX_ALARMS:
        console.print(f"[bold red]… and {len(alarms) - _MAX_ALARMS} more alarms[/bold red]; see OVERALL_SUMMARY.md")


def _show_reasons(console: Console, wrong: list[OperatorTally]) -> None:
    for tally in wrong[:_MAX_FAILED_OPERATORS]:
        console.print(f"[bold]{escape_line(tally.op)}[/bold] ({escape_line(tally.kernel)})")
        for verdict, reason, count in tally.main_reasons(2):
            console.print(f"  {count}× [red]{escape_line(verdict)}[/red]: {escape_line(reason)}", soft_wrap=True)
        if len(tally.reasons) > 2:
            console.print(f"  and {len(tally.reasons) - 2} other reasons")
    if len(wrong) > _MAX_FAILED_OPERATORS:
        console.print(f"… and {len(wrong) - _MAX_FAILED_OPERATORS} more failing operators; see OVERALL_SUMMARY.md")


def _show_scores(console: Console, summary: Summary) -> None:
    scores = summary.scores()
    console.print(
        f"correctness  {scores['correctness']:.4f} over {scores['operators']} {summary.unit_noun}; "
        f"{scores['correctness_of_judged']:.4f} over the {scores['judged']} that the backend implements (coverage "
        f"{scores['coverage']:.4f})",
        soft_wrap=True,
    )
    for title, text in speed_text.score_lines(summary):
        console.print(f"{title:12} {escape(text)}", soft_wrap=True)
    console.print(f"cases        {scores['cases']}: {verdict_counts_text(scores['verdicts'])}", soft_wrap=True)
    for reason, count in summary.not_replayed.most_common(_MAX_NOT_REPLAYED):
        console.print(f"through Python, {count}×: {escape_line(reason)}", soft_wrap=True)
