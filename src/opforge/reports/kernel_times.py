"""Timings of one kernel on the terminal: a block for each case."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console

from opforge.judge.verdict import VerdictKind
from opforge.reports.speed_text import percent, ratio_text
from opforge.reports.terminal import escape_line
from opforge.runs.rows import ResultRow, SolRecord, TimeRecord
from opforge.runs.speed import Ratio

_KINDS = ("device", "call", "sync")
_WORDS = {
    "graph": "as a CUDA graph",
    "events": "by events (could not be captured as a graph)",
    "cold": "cold cache",
    "warm": "warm cache",
}
_LAUNCH_BOUND_NOTE = "ATen's time is within the launch overhead here, so the timing says little about the kernel"


def print_kernel_times(console: Console, rows: Iterable[ResultRow]) -> None:
    """Print the verdict and the times of each case."""
    for row in rows:
        console.print(f"[bold]{escape_line(row.case)}[/bold]", soft_wrap=True)
        for line in _block(row):
            console.print(f"  {line}", soft_wrap=True)


def _block(row: ResultRow) -> Iterator[str]:
    if row.verdict != VerdictKind.PASSED:
        yield f"[red]{row.verdict}[/red], so it was not timed: {escape_line(row.reason)}"
    elif row.headline is None:
        yield "[red]not timed[/red]"
    else:
        yield from (escape_line(line) for line in _timing_lines(row, row.headline))
    if row.launch_bound:
        yield f"[yellow]launch-bound[/yellow] {_LAUNCH_BOUND_NOTE}"
    if row.alarm:
        yield f"[bold red]ALARM[/bold red] {escape_line(row.alarm)}; not counted"
    for note in row.notes:
        yield f"[yellow]note[/yellow] {escape_line(note)}"


def _timing_lines(row: ResultRow, headline: TimeRecord) -> Iterator[str]:
    timings = {kind: times for kind in _KINDS if (times := row.times(kind)) is not None}
    for kind, times in (timings or {row.timed or "call": headline}).items():  # older runs have the headline only
        yield _line(kind, times)
    if row.sol is not None:
        yield _sol_line(row.sol)


def _line(title: str, times: TimeRecord) -> str:
    text = f"kernel {_us(times.kernel_us)}   ATen {_us(times.aten_us)}   × ATen {ratio_text(Ratio.of(times))}"
    remarks = [f"{times.rounds} rounds" + (f" of {times.calls} calls" if times.calls else "")]
    remarks += [_WORDS[word] for word in (times.method, times.cache) if word in _WORDS]
    return f"{title:7} {text}   {', '.join(remarks)}"


def _sol_line(sol: SolRecord) -> str:
    sides = "   ".join(
        f"{who} {percent(share)} %" for who, share in (("kernel", sol.kernel), ("ATen", sol.aten)) if share is not None
    )
    work = f"{sol.bytes:,.0f} bytes, {sol.flops:,.0f} flops"
    if sol.bound == "latency":
        return f"SOL     latency-bound: {_us(sol.us)} for {work} is less than the smallest launch or call takes"
    counted = {"formula": "by formula", "estimate": "an estimate"}.get(sol.counted, sol.counted)
    return f"SOL     {sides}   of {_us(sol.us)}, {sol.bound}-bound ({work}, {counted})"


def _us(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.2f} µs" if value < 10 else f"{value:.1f} µs"
