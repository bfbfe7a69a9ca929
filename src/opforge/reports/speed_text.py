"""Text and columns for speeds, shared by the terminal, the summary and the tables."""

from __future__ import annotations

from collections.abc import Iterator

from opforge.runs.score import OperatorTally, Summary
from opforge.runs.speed import PerfAtP, Ratio
from opforge.sandbox.host.reply import WAYS

Cell = str | int | float | None


def ratio_text(ratio: Ratio, digits: int = 3) -> str:
    """Return a speedup with its interval."""
    return f"{ratio.value:.{digits}f} [{ratio.low:.{digits}f}, {ratio.high:.{digits}f}]"


def share_text(share: PerfAtP) -> str:
    """Return perf@p with its interval."""
    return f"perf@{share.p:g} {share.value:.2f} [{share.low:.2f}, {share.high:.2f}]"


def performance_text(summary: Summary) -> str:
    """Return the performance score and perf@p, or that nothing was timed."""
    speed, share = summary.speed, summary.perf_at(summary.p)
    scored = "nothing timed (no performance cases of right kernels)" if speed is None else _times(summary, speed)
    if speed is None and any(t.times for t in summary.operators.values()):
        scored = "no timed case counts"
    return (
        scored if share is None else f"{scored}, {share_text(share)} of {len(summary.timed_units)} {summary.unit_noun}"
    )


def score_lines(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield the titles and texts of the speed scores; only the first is present without data."""
    yield "performance", performance_text(summary)
    if summary.call_speed is not None:
        yield "call times", _times(summary, summary.call_speed)
    if summary.launch_speed is not None:
        operators = [t for t in summary.judged if t.launch_bound_times]
        cases = sum(len(t.launch_bound_times) for t in operators)
        yield (
            "launch-bound",
            (
                f"{_times(summary, summary.launch_speed)} over {cases} cases of {len(operators)} {summary.unit_noun}, "
                "scored separately"
            ),
        )
    if remark := _timed_counts_text(summary):
        yield "timed", remark
    if summary.ways:
        counts = ", ".join(f"{summary.ways[way]} {way}" for way in WAYS if summary.ways[way])
        yield "runtime", f"native; cases by the way they ran: {counts}"


def _timed_counts_text(summary: Summary) -> str:
    """Return how many performance cases count, if not all do."""
    scores = summary.scores()
    lost = scores["performance_cases"] - scores["timed_cases"]
    parts = {
        "launch-bound": scores["launch_bound_cases"],
        "faster than SOL (not counted)": scores["alarmed_cases"],
        "not timed": lost,
    }
    uncounted = ", ".join(f"{count} {label}" for label, count in parts.items() if count)
    return (
        f"{scores['timed_cases']} of {scores['performance_cases']} performance cases: {uncounted}" if uncounted else ""
    )


def alarm_lines(summary: Summary) -> Iterator[tuple[str, str, str]]:
    """Yield operator with kernel, alarm and case, for cases faster than the speed of light."""
    for tally, timed in summary.alarms:
        yield f"{tally.op} ({tally.kernel})", timed.alarm, timed.case


def machine_notes(summary: Summary) -> Iterator[str]:
    """Yield each note on clocks and power once."""
    timed = sum(len(t.times) for t in summary.operators.values())
    for note, count in summary.machine_notes.values():
        yield f"{note} (in {count} of {timed} timed cases)"


def speed_cell(tally: OperatorTally) -> str:
    """Return an operator's speedup, or that of its launch-bound cases, which `marks` then shows."""
    speed, count = tally.speed, len(tally.scored_times)
    if speed is None:
        speed, count = tally.launch_speed, len(tally.launch_bound_times)
    if speed is None:
        return ""
    return ratio_text(speed) + (f" (n={count})" if count > 1 else "")


def call_cell(tally: OperatorTally) -> str:
    return "" if tally.call_speed is None else ratio_text(tally.call_speed, 2)


def sol_cell(tally: OperatorTally) -> str:
    """Return the kernel's percentage of the speed of light, with ATen's in brackets."""
    if tally.sol_percent is None:
        return ""
    return percent(tally.sol_percent) + (
        "" if tally.aten_sol_percent is None else f" ({percent(tally.aten_sol_percent)})"
    )


def percent(value: float) -> str:
    """Return a percentage with at least two digits."""
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def timing_remarks(tally: OperatorTally) -> str:
    """Return remarks on an operator's times: alarms, launch-bound cases, timing by events."""
    launch_bound, alarms = len(tally.launch_bound_times), len(tally.alarms)
    events = sum(1 for t in tally.times if t.events) if tally.is_correct else 0
    remarks = []
    if alarms:
        remarks.append(f"{alarms} ALARM{'S' if alarms > 1 else ''}" if len(tally.times) > 1 else "ALARM")
    if launch_bound:
        remarks.append("launch-bound" if tally.all_launch_bound else f"{launch_bound} launch-bound")
    if events:
        remarks.append("events" if events == len(tally.times) else f"{events} by events")
    return ", ".join(remarks)


def operator_fields(tally: OperatorTally | None) -> dict[str, Cell]:
    """Return an operator's speeds for tables and JSON; without a kernel, all are empty."""
    tally = tally or OperatorTally("")
    speed, launch, call = tally.speed, tally.launch_speed, tally.call_speed
    return {
        "speedup_low": None if speed is None else speed.low,
        "speedup_high": None if speed is None else speed.high,
        "call_speedup": None if call is None else call.value,
        "sol_percent": tally.sol_percent,
        "aten_sol_percent": tally.aten_sol_percent,
        "timed": len(tally.times),
        "launch_bound": sum(1 for t in tally.times if t.launch_bound),
        "launch_bound_speedup": None if launch is None else launch.value,
        "alarmed": len(tally.alarms),
    }


def _times(summary: Summary, ratio: Ratio) -> str:
    return f"{ratio.value:.3f}× {summary.baseline} [{ratio.low:.3f}, {ratio.high:.3f}]"
