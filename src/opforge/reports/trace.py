"""Terminal summary of a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from opforge.reports.terminal import console_for_results
from opforge.traces.trace_file import Trace

_MAX_SHOWN_LOSSES = 10


def print_trace(trace: Trace, paths: Iterable[str]) -> None:
    """Print the number of calls in a trace, by phase, and the calls that were lost."""
    console = console_for_results()
    phases: Counter[str] = Counter()
    for call in trace.calls:
        for seen in call.seen:
            phases[seen.phase] += seen.count
    console.print(f"models       {', '.join(trace.metadata.get('models', []))}", soft_wrap=True)
    console.print(f"calls        {phases.total()}: {', '.join(f'{n} {phase}' for phase, n in phases.most_common())}")
    console.print(f"distinct     {len(trace.calls)} calls of {trace.operators} operators")
    if trace.losses:
        console.print(f"lost         {sum(trace.losses.values())} calls")
    for reason, count in list(trace.losses.items())[:_MAX_SHOWN_LOSSES]:
        console.print(f"             {reason} ({count}×)", soft_wrap=True, markup=False)
    if len(trace.losses) > _MAX_SHOWN_LOSSES:
        console.print(f"             and {len(trace.losses) - _MAX_SHOWN_LOSSES} other reasons")
    for path in paths:
        console.print(f"written      {path}", soft_wrap=True, markup=False)
