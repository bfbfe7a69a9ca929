"""Timings of one kernel on the terminal: a block for each case."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console

from opforge.judge.verdict import Outcome
from opforge.reports.speed import percent, ratio_text
from opforge.reports.terminal import words
from opforge.runs.speed import Ratio

_KINDS = ("device", "call", "sync")
_WORDS = {
    "graph": "as a CUDA graph",
    "events": "by events (could not be captured as a graph)",
    "cold": "cold cache",
    "warm": "warm cache",
}
_LAUNCH_BOUND_NOTE = (
    "ATen's own time here is no more than the overhead of a launch, so the figures say little of the kernel"
)


def show(console: Console, rows: Iterable[Mapping[str, Any]]) -> None:
    """Print the verdict and the times of each case."""
    for row in rows:
        console.print(f"[bold]{words(row['case'])}[/bold]", soft_wrap=True)
        for line in _block(row):
            console.print(f"  {line}", soft_wrap=True)


def _block(row: Mapping[str, Any]) -> Iterator[str]:
    if row["verdict"] != Outcome.PASSED:
        yield f"[red]{row['verdict']}[/red], so there is no time: {words(row['reason'])}"
    elif row.get("speedup") is None:
        yield "[red]not timed[/red]"
    else:
        yield from (words(line) for line in _timing_lines(row))
    if row.get("launch_bound"):
        yield f"[yellow]launch-bound[/yellow] {_LAUNCH_BOUND_NOTE}"
    if row.get("alarm"):
        yield f"[bold red]ALARM[/bold red] {words(row['alarm'])}; this is no record"
    for note in row.get("notes", ()):
        yield f"[yellow]note[/yellow] {words(note)}"


def _timing_lines(row: Mapping[str, Any]) -> Iterator[str]:
    timings = {kind: row[kind] for kind in _KINDS if row.get(kind)}
    if not timings:  # from an older run
        old = {"low": row["speedup_low"], "high": row["speedup_high"], "calls": row.get("calls_per_round")}
        timings = {row.get("timed", "call"): {**row, **old}}
    for kind, timing in timings.items():
        yield _line(kind, timing)
    if light := row.get("light"):
        yield _light(light)


def _line(title: str, timing: Mapping[str, Any]) -> str:
    ratio = ratio_text(Ratio(timing["speedup"], timing["low"], timing["high"]))
    times = f"kernel {_us(timing['kernel_us'])}   ATen {_us(timing['aten_us'])}   × ATen {ratio}"
    remarks = [f"{timing['rounds']} rounds" + (f" of {timing['calls']} calls" if timing.get("calls") else "")]
    remarks += [_WORDS[timing[name]] for name in ("method", "cache") if timing.get(name) in _WORDS]
    return f"{title:7} {times}   {', '.join(remarks)}"


def _light(light: Mapping[str, Any]) -> str:
    sides = "   ".join(
        f"{who} {percent(light[side])} %" for who, side in (("kernel", "kernel"), ("ATen", "aten")) if side in light
    )
    counted = {"formula": "by formula", "estimate": "an estimate"}.get(light["counted"], light["counted"])
    work = f"{light['bytes']:,.0f} bytes, {light['flops']:,.0f} flops, {counted}"
    return f"light   {sides}   of {_us(light['us'])}, {light['bound']}-bound ({work})"


def _us(value: float) -> str:
    return f"{value:.2f} µs" if value < 10 else f"{value:.1f} µs"
