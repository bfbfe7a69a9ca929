"""A run on the terminal: a table of operators, the reasons of what is not right, the scores."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from opforge.judge.verdict import Outcome
from opforge.reports.files import performance_text, verdict_text, weak_text
from opforge.runs.score import OperatorTally, Summary

_PLAIN_WIDTH = 140
_MAX_ROWS = 40
_MAX_REASONS = 25
_MAX_WEAK = 5


def console_for_results() -> Console:
    """Return a console on stdout; wide when nobody's window limits it."""
    console = Console()
    return console if console.is_terminal else Console(width=_PLAIN_WIDTH)


def show(console: Console, manifest: dict[str, Any], summary: Summary) -> None:
    """Print a run."""
    tallies = sorted(summary.judged, key=lambda t: (t.right, t.op))
    console.print(_table(manifest, summary, tallies[:_MAX_ROWS]))
    if len(tallies) > _MAX_ROWS:
        hidden = tallies[_MAX_ROWS:]
        console.print(
            f"… and {len(hidden)} more operators, {sum(1 for t in hidden if t.right)} of them right; all are in operator_summary.csv"
        )
    _show_reasons(console, [t for t in tallies if not t.right])
    if summary.declined:
        console.print(f"declined (not counted as served): {', '.join(summary.declined)}")
    for kernel in manifest["plan"]["kernels"]:
        if kernel.get("hints") and any(not t.right for t in tallies if t.op in kernel["ops"]):
            console.print(f"[yellow]hint[/yellow] {escape(kernel['name'])} {escape('; '.join(kernel['hints']))}")
    for remark in manifest["plan"]["remarks"]:
        console.print(f"[yellow]note[/yellow] {escape(remark)}")
    if (losses := manifest["plan"]["losses"]) and not manifest["config"]["ops"]:
        console.print(f"{len(losses)} kinds of samples could not become cases; they are listed in OVERALL_SUMMARY.md")
    _show_weak(console, summary)
    _show_scores(console, summary)


def _show_weak(console: Console, summary: Summary) -> None:
    weak = sorted(summary.weak_judged.items())
    if not weak:
        return
    shown = "; ".join(f"{op} ({', '.join(mutants)})" for op, mutants in weak[:_MAX_WEAK])
    more = f"; and {len(weak) - _MAX_WEAK} more in OVERALL_SUMMARY.md" if len(weak) > _MAX_WEAK else ""
    console.print(f"[yellow]weak cases[/yellow]   {weak_text(summary)} {shown}{more}", soft_wrap=True)


def _table(manifest: dict[str, Any], summary: Summary, tallies: list[OperatorTally]) -> Table:
    config = manifest["config"]
    table = Table(
        title=f"{config['backend']} on {config['suite']} ({config['device']})",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("operator", no_wrap=True)
    table.add_column("kernel", overflow="fold")
    table.add_column("passed", justify="right")
    table.add_column("verdict")
    timed = any(t.speedups for t in summary.judged)
    if timed:
        table.add_column("× ATen", justify="right")
    for tally in tallies:
        colour = "green" if tally.right else "red"
        cells = [tally.op, tally.kernel, f"{tally.passed}/{tally.total}", f"[{colour}]{_verdicts(tally)}[/{colour}]"]
        if timed:
            cells.append(_speedup(tally))
        table.add_row(*cells)
    return table


def _verdicts(tally: OperatorTally) -> str:
    if tally.right:
        return "passed"
    return ", ".join(f"{tally.verdicts[o]} {o}" for o in Outcome if o is not Outcome.PASSED and tally.verdicts[o])


def _speedup(tally: OperatorTally) -> str:
    if not tally.right or not tally.speedups:
        return ""
    if len(tally.speedups) == 1:
        centre, low, high = tally.speedups[0]
        return f"{centre:.3f} [{low:.3f}, {high:.3f}]"
    return f"{tally.speedup:.3f} (n={len(tally.speedups)})"


def _show_reasons(console: Console, wrong: list[OperatorTally]) -> None:
    for tally in wrong[:_MAX_REASONS]:
        console.print(f"[bold]{tally.op}[/bold] ({escape(tally.kernel)})")
        for verdict, reason, count in tally.main_reasons(2):
            console.print(f"  {count}× [red]{verdict}[/red]: {escape(reason)}", soft_wrap=True)
        if len(tally.reasons) > 2:
            console.print(f"  and {len(tally.reasons) - 2} other reasons")
    if len(wrong) > _MAX_REASONS:
        console.print(f"… and {len(wrong) - _MAX_REASONS} more operators that are not right; see OVERALL_SUMMARY.md")


def _show_scores(console: Console, summary: Summary) -> None:
    scores = summary.scores()
    console.print(
        f"correctness  {scores['correctness']:.4f} over {scores['operators']} operators; "
        f"{scores['correctness_of_judged']:.4f} over the {scores['judged']} that the backend implements (coverage {scores['coverage']:.4f})",
        soft_wrap=True,
    )
    console.print(f"performance  {performance_text(summary)}", soft_wrap=True)
    console.print(f"cases        {scores['cases']}: {verdict_text(scores['verdicts'])}", soft_wrap=True)
