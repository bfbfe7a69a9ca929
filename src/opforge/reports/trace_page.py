"""Markdown page on a trace: its operators, its cases, and the models that they come from."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from opforge.traces.trace_file import Trace, TracedCall

_MAX_NAMED_MODELS = 3
"""Number of models to name for each operator."""


def markdown(trace: Trace, path: Path, title: str = "The suite `torchbench`") -> str:
    """Return the page on a trace that was read from a file."""
    lines = [
        f"# {title}",
        *_head(trace, path),
        *_architecture_table(trace.calls),
        *_operators(trace.calls),
        *_failures_and_losses(trace),
    ]
    return "\n".join(lines) + "\n"


def _head(trace: Trace, path: Path) -> Iterator[str]:
    about = trace.metadata
    phases: Counter[str] = Counter()
    for call in trace.calls:
        for seen in call.seen:
            phases[seen.phase] += seen.count
    device = str(about.get("device", "?")) + (", without contents" if about.get("fake") else "")
    yield "Operator calls of whole models, with their shapes, strides and dtypes."
    yield "Each distinct call is a case, weighted by how often it was made."
    yield ""
    yield from _table(
        ("", ""),
        [
            ("architectures", len(about.get("models", []))),
            ("operators", trace.operators),
            ("distinct calls", len(trace.calls)),
            ("calls", f"{phases.total()}: " + ", ".join(f"{n} {phase}" for phase, n in phases.most_common())),
            ("outside ATen's namespace", sum("::" in call.op for call in trace.calls)),
            ("with stored contents", sum(bool(call.digest) for call in trace.calls)),
            ("size", f"{path.stat().st_size / (1 << 20):.2f} MiB"),
            ("recorded", f"{about.get('recorded', '?')[:10]}, torch {about.get('torch', '?')}, {device}"),
        ],
    )


def _architecture_table(calls: Iterable[TracedCall]) -> Iterator[str]:
    operators: dict[str, set[str]] = defaultdict(set)
    cases: Counter[str] = Counter()
    unique: Counter[str] = Counter()
    phases: dict[str, Counter[str]] = defaultdict(Counter)
    for call in calls:
        models = {seen.model for seen in call.seen}
        for model in models:
            operators[model].add(call.op)
            cases[model] += 1
            unique[model] += len(models) == 1
        for seen in call.seen:
            phases[seen.model][seen.phase] += seen.count
    yield "\n## Architectures"
    yield "*Unique* cases occur in no other architecture.\n"
    rows = [
        (
            f"`{m}`",
            len(operators[m]),
            cases[m],
            unique[m],
            *(phases[m][p] for p in ("forward", "backward", "optimizer")),
        )
        for m in sorted(cases)
    ]
    yield from _table(("architecture", "operators", "cases", "unique", "forward", "backward", "optimizer"), rows)


def _operators(calls: Iterable[TracedCall]) -> Iterator[str]:
    cases: Counter[str] = Counter()
    model_counts: dict[str, Counter[str]] = defaultdict(Counter)
    for call in calls:
        cases[call.op] += 1
        for seen in call.seen:
            model_counts[call.op][seen.model] += seen.count
    yield "\n## Operators"
    yield (
        f"Each with the {_MAX_NAMED_MODELS} architectures that call it most; the file lists all of them for each case "
        "in `seen`.\n"
    )
    rows = [(f"`{op}`", cases[op], model_counts[op].total(), _named(model_counts[op])) for op in sorted(cases)]
    yield from _table(("operator", "cases", "calls", "from"), rows)


def _named(model_counts: Counter[str]) -> str:
    first = ", ".join(model for model, _ in model_counts.most_common(_MAX_NAMED_MODELS))
    return (
        f"{first} and {len(model_counts) - _MAX_NAMED_MODELS} more" if len(model_counts) > _MAX_NAMED_MODELS else first
    )


def _failures_and_losses(trace: Trace) -> Iterator[str]:
    failed: dict[str, str] = trace.metadata.get("failed", {})
    if failed:
        yield "\n## Failed runs"
        yield "Calls recorded before the failure are kept.\n"
        yield from _table(("run", "why"), [(f"`{run}`", _cell(why)) for run, why in sorted(failed.items())])
    if trace.losses:
        yield "\n## Calls that could not be recorded\n"
        yield from _table(("why", "calls"), [(_cell(why), count) for why, count in trace.losses.items()])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _table(head: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row) + " |"
