"""Timings of one kernel on the terminal: a block for each case."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console

from opforge.judge.verdict import VerdictKind
from opforge.reports.speed_text import percent, ratio_text
from opforge.reports.terminal import escape_line
from opforge.runs.speed import Ratio

_KINDS = ("device", "call", "sync")
_WORDS = {
    "graph": "as a CUDA graph",
    "events": "by events (could not be captured as a graph)",
    "cold": "cold cache",
    "warm": "warm cache",
}
_LAUNCH_BOUND_NOTE = "ATen's time is within the launch overhead here, so the timing says little about the kernel"


def print_kernel_times(console: Console, rows: Iterable[Mapping[str, Any]]) -> None:
    """Print the verdict and the times of each case."""
    for row in rows:
        console.print(f"[bold]{escape_line(row['case'])}[/bold]", soft_wrap=True)
        for line in _block(row):
            console.print(f"  {line}", soft_wrap=True)


def _block(row: Mapping[str, Any]) -> Iterator[str]:
    if row["verdict"] != VerdictKind.PASSED:
        yield f"[red]{row['verdict']}[/red], so it was not timed: {escape_line(row['reason'])}"
    elif row.get("speedup") is None:
        yield "[red]not timed[/red]"
    else:
        yield from (escape_line(line) for line in _timing_lines(row))
    if row.get("launch_bound"):
        yield f"[yellow]launch-bound[/yellow] {_LAUNCH_BOUND_NOTE}"
    if row.get("alarm"):
        yield f"[bold red]ALARM[/bold red] {escape_line(row['alarm'])}; not counted"
    for note in row.get("notes", ()):
        yield f"[yellow]note[/yellow] {escape_line(note)}"


def _timing_lines(row: Mapping[str, Any]) -> Iterator[str]:
    timings = {kind: row[kind] for kind in _KINDS if row.get(kind)}
    if not timings:  # from an older run
        old = {"low": row["speedup_low"], "high": row["speedup_high"], "calls": row.get("calls_per_round")}
        timings = {row.get("timed", "call"): {**row, **old}}
    for kind, timing in timings.items():
        yield _line(kind, timing)
    if sol := row.get("sol"):
        yield _sol_line(sol)


def _line(title: str, timing: Mapping[str, Any]) -> str:
    ratio = ratio_text(Ratio(timing["speedup"], timing["low"], timing["high"]))
    times = f"kernel {_us(timing['kernel_us'])}   ATen {_us(timing['aten_us'])}   × ATen {ratio}"
    remarks = [f"{timing['rounds']} rounds" + (f" of {timing['calls']} calls" if timing.get("calls") else "")]
    remarks += [_WORDS[timing[name]] for name in ("method", "cache") if timing.get(name) in _WORDS]
    return f"{title:7} {times}   {', '.join(remarks)}"


def _sol_line(sol: Mapping[str, Any]) -> str:
    sides = "   ".join(
        f"{who} {percent(sol[side])} %" for who, side in (("kernel", "kernel"), ("ATen", "aten")) if side in sol
    )
    counted = {"formula": "by formula", "estimate": "an estimate"}.get(sol["counted"], sol["counted"])
    work = f"{sol['bytes']:,.0f} bytes, {sol['flops']:,.0f} flops, {counted}"
    return f"SOL     {sides}   of {_us(sol['us'])}, {sol['bound']}-bound ({work})"


def _us(value: float) -> str:
    return f"{value:.2f} µs" if value < 10 else f"{value:.1f} µs"
