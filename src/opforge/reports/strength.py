"""Strength of a suite on the terminal: kill rates by mutant and operator, and the survivors."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from opforge.kernels.mutants import IGNORED_PREFIX, MUTANTS
from opforge.runs.strength import MutantResult, Strength

_MAX_OPERATORS = 40


def print_strength(console: Console, strength: Strength) -> None:
    """Print a suite's strength."""
    console.print(_mutant_table(strength))
    weak = strength.weak
    if weak:
        console.print(_operators(strength, list(weak)[:_MAX_OPERATORS]))
    if len(weak) > _MAX_OPERATORS:
        console.print(f"… and {len(weak) - _MAX_OPERATORS} more weak operators; `--format json` lists all")
    _scores(console, strength)


def _mutant_table(strength: Strength) -> Table:
    title = f"mutants of ATen on {strength.suite} ({strength.device}, {', '.join(strength.dtypes)})"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name, justify in (("mutant", "left"), ("killed", "right"), ("rate", "right"), ("what it does", "left")):
        table.add_column(name, justify="right" if justify == "right" else "left")
    rates = strength.by_mutant()
    for name, description in MUTANTS.items():
        if name in rates:
            killed, count = rates[name]
            label = "ignored argument" if name == IGNORED_PREFIX else name
            table.add_row(label, f"{killed}/{count}", f"{killed / count:.3f}", description)
    return table


def _operators(strength: Strength, names: list[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("weak operator", no_wrap=True)
    table.add_column("killed", justify="right")
    table.add_column("survivors (* differed from ATen on a case and still passed)")
    rates = strength.by_operator()
    survivors: dict[str, list[MutantResult]] = {}
    for trace in strength.survivors:
        survivors.setdefault(trace.op, []).append(trace)
    for op in names:
        killed, count = rates[op]
        table.add_row(op, f"{killed}/{count}", ", ".join(_survivor(t) for t in survivors[op]))
    return table


def _survivor(trace: MutantResult) -> str:
    return trace.mutant + ("*" if trace.passed_wrong else "")


def _scores(console: Console, strength: Strength) -> None:
    row = strength.as_json()
    kills = ", ".join(f"{count} {verdict}" for verdict, count in strength.kills.most_common())
    console.print(
        f"kill rate    {row['kill_rate']:.4f}: {row['killed']} of {row['mutants']} mutants ({kills or 'none'})"
    )
    console.print(f"equivalent   {row['equivalent']} that no input distinguishes from ATen")
    survivors = strength.survivors
    loose = sum(1 for t in survivors if t.passed_wrong)
    console.print(
        f"survivors    {len(survivors)}: {len(survivors) - loose} that differed in no case, {loose} that differed and "
        "still passed"
    )
    console.print(f"weak         {len(strength.weak)} of {len(strength.by_operator())} operators")
