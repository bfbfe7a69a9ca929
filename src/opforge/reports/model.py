"""Terminal report of a model with kernels installed: calls, results, times, kernels to blame."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from opforge.judge.verdict import VerdictKind
from opforge.reports.speed_text import ratio_text
from opforge.reports.terminal import escape_line
from opforge.runs.speed import Ratio

_MAX_WRONG_RESULTS = 8


def print_model_report(console: Console, report: Mapping[str, Any]) -> None:
    """Print the report on a model."""
    kind = "training" if report["train"] else "inference"
    colour = "green" if report["verdict"] == VerdictKind.PASSED else "red"
    head = f"{report['model']} with {report['backend']} on {report['device']} ({report['dtype']}, {kind})"
    console.print(f"{escape_line(head)}: [{colour}]{report['verdict']}[/{colour}]", soft_wrap=True)
    console.print(_kernels(report["kernels"]))
    for line in _lines(report):
        console.print(line, soft_wrap=True)


def _kernels(rows: list[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("kernel", no_wrap=True)
    timed = any("kernel_us" in row for row in rows)
    for title in ("calls", "fell back", *(("kernel µs", "ATen µs") if timed else ())):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("operators", overflow="fold")
    for row in sorted(rows, key=lambda row: (-row["calls"], -row["fallbacks"], row["kernel"])):
        times = [_range(row, who) for who in ("kernel", "aten")] if timed else []
        ops = ", ".join(f"{op} {count}" for op, count in row["ops"].items()) or "not called"
        table.add_row(escape_line(row["kernel"]), str(row["calls"]), str(row["fallbacks"]), *times, escape_line(ops))
    return table


def _range(row: Mapping[str, Any], side: str) -> str:
    if f"{side}_us" not in row:
        return ""
    low, high = row[f"{side}_us_range"]
    return escape_line(f"{_us(row[f'{side}_us'])} [{_us(low)}, {_us(high)}]")


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    for row in report["kernels"]:
        if "verdict" in row:
            yield f"[red]{row['verdict']}[/red] {escape_line(row['kernel'])}: {escape_line(row['reason'])}"
        for reason, count in row["fallback_reasons"].items():
            yield f"[yellow]fell back[/yellow] {escape_line(row['kernel'])}, {count}×: {escape_line(reason)}"
        for reason in dict.fromkeys(row["refused"].values()):
            yield f"[yellow]not installed[/yellow] {escape_line(row['kernel'])}: {escape_line(reason)}"
    for note in (*report["remarks"], *report["notes"]):
        yield f"[yellow]note[/yellow] {escape_line(note)}"
    yield from _results(report)
    if times := report.get("time"):
        ratio = ratio_text(Ratio(times["speedup"], times["low"], times["high"]))
        times_text = f"with kernels {_time(times['kernel_us'])}, without {_time(times['aten_us'])}, × ATen {ratio}"
        yield escape_line(f"time         {times_text}, {times['rounds']} rounds of {times['calls']}")
    if (blame := report.get("blame")) is not None:
        yield from _blame(blame)


def _results(report: Mapping[str, Any]) -> Iterator[str]:
    results = report["results"]
    wrong = [row for row in results if not row["right"]]
    yield f"results      {len(results) - len(wrong)} of {len(results)} right" if results else "results      none"
    if report["reason"]:
        yield f"  [red]{report['verdict']}[/red]: {escape_line(report['reason'])}"
    for row in wrong[:_MAX_WRONG_RESULTS]:
        yield escape_line(f"  {row['reason']}")
    if len(wrong) > _MAX_WRONG_RESULTS:
        yield f"  … and {len(wrong) - _MAX_WRONG_RESULTS} more (--format json lists all)"


def _blame(blame: Mapping[str, Any]) -> Iterator[str]:
    for row in blame["guilty"]:
        yield (
            f"[bold red]caused by[/bold red]    {escape_line(row['kernel'])}, {row['verdict']} by itself: "
            f"{escape_line(row['reason'])}"
        )
        yield from _first_error_lines(row)
    for group in blame["together"]:
        names = ", ".join(row["kernel"] for row in group)
        yield f"[bold red]caused by[/bold red]    {escape_line(names)}: wrong with all of them, right without any one"
        for row in group:
            yield from _first_error_lines(row)
    if not blame["guilty"] and not blame["together"]:
        yield "[bold red]caused by[/bold red]    unknown: no set of kernels fails by itself"
    yield f"found in {blame['trials']} more runs of the model"


def _first_error_lines(row: Mapping[str, Any]) -> Iterator[str]:
    first = row["first"]
    if first is None:
        share = f"; the largest error is {row['largest_share_of_bound']:.0%} of its bound" if row["looked_at"] else ""
        yield escape_line(f"  {row['kernel']}: each of {row['looked_at']} calls is within its bound by itself{share}")
        return
    yield escape_line(
        f"  first wrong call: {first['number'] + 1} of {row['calls']} ({first['phase']}): {first['op']} {first['case']}"
    )
    yield f"    [red]{first['verdict']}[/red]: {escape_line(first['reason'])}"
    command = ["opforge", "time", str(row["file"]), "--op", first["op"], "--case", first["case"]]
    if first.get("also_with_seeded_contents", True):
        yield escape_line(f"    {shlex.join(command)}")
    else:
        yield "    right with seeded contents of the same shapes: the error depends on the values"


def _us(us: float) -> str:
    return f"{us:.3g}" if us < 1000 else f"{us:.0f}"


def _time(us: float) -> str:
    return f"{us / 1000:.3g} ms" if us >= 1000 else f"{us:.3g} µs"
