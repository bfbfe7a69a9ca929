"""Data that the page shows at once: scores, state, operators, reasons, remarks.

Cases are loaded when an operator is opened.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opforge.judge.verdict import VerdictKind
from opforge.reports import speed_text
from opforge.reports.page.case_data import CaseData
from opforge.reports.page.kernel_sources import kernel_rows
from opforge.runs.manifest import Manifest
from opforge.runs.score import PERF_AT_P_THRESHOLDS, OperatorTally, Summary

FINISHED, RUNNING, INTERRUPTED = "finished", "running", "interrupted"
_MISSING, _DECLINED, _WAITING = "no kernel", "declined", "not judged"
"""Labels for operators without a verdict."""
_WORST_FIRST = (
    VerdictKind.CHEATED, VerdictKind.CRASHED, VerdictKind.TIMED_OUT, VerdictKind.WRONG, VerdictKind.CONTRACT,
    VerdictKind.ERROR, VerdictKind.UNSUPPORTED, VerdictKind.PASSED,
)  # fmt: skip
_MAX_REASONS = 200
_MAX_SECTION_LINES = 500
_NUMBER_PATTERN = re.compile(r"-?\d[\d.]*(?:e[-+]?\d+)?")


def run_page_data(path: Path, manifest: Manifest, summary: Summary, case_data: CaseData, state: str) -> dict[str, Any]:
    """Return the data of a run's page, except cases and sources."""
    judged, planned = summary.case_counts.total(), manifest.plan.cases
    names = _unit_names(manifest, summary, case_data)
    return {
        "kind": "run",
        "title": f"{manifest.backend} on {Path(manifest.suite).name}",
        "device": manifest.device,
        "state": {"word": state, "judged": judged, "planned": planned, "resume": _command("run", "--resume", path)},
        "reproduce": _command("reproduce", path),
        "against": summary.baseline,
        "things": summary.unit_noun,
        "outcomes": [outcome.value for outcome in VerdictKind],
        "scores": list(_scores(summary)),
        "verdicts": {o.value: n for o in VerdictKind if (n := summary.case_counts[o.value])},
        "units": _units(names, manifest, summary),
        "kernels": kernel_rows(manifest),
        "reasons": _reasons(names, summary),
        "alarms": [{"who": who, "alarm": alarm, "case": case} for who, alarm, case in speed_text.alarm_lines(summary)],
        "sections": list(_sections(manifest, summary)),
        "about": list(_about(manifest)),
        "roofs": _roofs(manifest.peaks),
    }


def run_state(manifest: Manifest, summary: Summary, *, is_locked: bool = False) -> str:
    """Return the state of a run; ``is_locked`` says whether a process is writing to it."""
    complete = summary.case_counts.total() >= manifest.plan.cases
    if complete and manifest.finished is not None:
        return FINISHED
    return RUNNING if is_locked else INTERRUPTED


def _command(*arguments: str | Path) -> str:
    return shlex.join(
        ["opforge", *(str(argument.resolve()) if isinstance(argument, Path) else argument for argument in arguments)]
    )


def _unit_names(manifest: Manifest, summary: Summary, columns: CaseData) -> list[str]:
    """Return the names of rows: judged (in the order of `columns`), waiting, without a kernel."""
    kernels = manifest.plan.kernels
    planned = [k.name if k.name in summary.separate_kernels else op for k in kernels for op in k.ops]
    return list(dict.fromkeys([*columns.unit_numbers, *planned, *summary.missing]))


def _units(names: list[str], manifest: Manifest, summary: Summary) -> dict[str, list[Any]]:
    """Return the operators as columns."""
    numbers = {(k.name, op): number for number, k in enumerate(manifest.plan.kernels) for op in k.ops}
    planned = {
        (kernel if kernel in summary.separate_kernels else op): OperatorTally(op, kernel) for kernel, op in numbers
    }
    missing, declined = set(summary.missing), set(summary.declined)
    rows = []
    for name in names:
        tally = summary.operators.get(name)
        if tally is None:
            tally, label = planned.get(name, OperatorTally(name)), _MISSING if name in missing else _WAITING
        else:
            label = _DECLINED if tally.op in declined else _verdict(tally)
        rows.append(_unit(tally, numbers.get((tally.kernel, tally.op), -1), label, summary))
    return {key: [row[key] for row in rows] for key in (rows[0] if rows else ())}


def _unit(tally: OperatorTally, kernel: int, label: str, summary: Summary) -> dict[str, Any]:
    ratio = tally.speed or tally.launch_speed
    return {
        "op": tally.op,
        "kernel": kernel,
        "verdict": label,
        "counts": {o.value: n for o in VerdictKind if (n := tally.verdicts[o.value])},
        "cases": tally.total,
        "passed": tally.passed,
        "speedup": None if ratio is None else ratio.value,
        "low": None if ratio is None else ratio.low,
        "high": None if ratio is None else ratio.high,
        "timed": len(tally.times),
        "sol": tally.sol_percent,
        "aten_sol": tally.aten_sol_percent,
        "marks": speed_text.timing_remarks(tally),
        "calls": ", ".join(f"{name} {count}×" for name, count in sorted(tally.calls.items())),
        "weak": ", ".join(summary.weak.get(tally.op, ())),
        "option": f" --kernel {shlex.quote(tally.kernel)}" if tally.per_kernel else "",
    }


def _verdict(tally: OperatorTally) -> str:
    """Return the worst verdict among its cases."""
    return next((o.value for o in _WORST_FIRST if tally.verdicts[o.value]), _WAITING)


def _reasons(names: list[str], summary: Summary) -> list[dict[str, Any]]:
    """Return why cases are not right, the most frequent reasons first.

    Reasons that differ only in numbers or in the operator's name count as one.
    """
    index_of = {name: index for index, name in enumerate(names)}
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for unit, tally in summary.operators.items():
        for (verdict, reason), count in tally.reasons.items():
            key = verdict, _NUMBER_PATTERN.sub("#", reason.replace(tally.op, "#"))
            group = groups.setdefault(key, {"verdict": verdict, "reason": reason, "count": 0, "units": {}})
            group["count"] += count
            group["units"][index_of[unit]] = None
    most_frequent = sorted(groups.values(), key=lambda g: -g["count"])[:_MAX_REASONS]
    return [{**group, "units": list(group["units"])} for group in most_frequent]


def _scores(summary: Summary) -> Iterator[dict[str, str]]:
    """Yield the scores, with their interval if they have one, and what they are measured over."""
    scores = summary.scores()
    yield _score(
        "correctness",
        f"{summary.correctness:.4f}",
        "",
        f"of {scores['operators']} {summary.unit_noun}; {summary.correctness_of_judged:.4f} of the {scores['judged']} "
        "that were judged",
    )
    yield _score(
        "coverage",
        f"{summary.coverage:.4f}",
        "",
        f"{scores['judged']} of {scores['operators']} {summary.unit_noun} were judged",
    )
    ratios = {
        "performance": (summary.speed, f"over {summary.baseline}, geometric mean of {scores['performance_operators']}"),
        "call times": (summary.call_speed, f"over {summary.baseline}"),
        "launch-bound": (
            summary.launch_speed,
            f"over {summary.baseline}, {scores['launch_bound_cases']} cases, scored separately",
        ),
    }
    for title, (ratio, remark) in ratios.items():
        if ratio is not None:
            yield _score(title, f"{ratio.value:.3f}×", f"[{ratio.low:.3f}, {ratio.high:.3f}]", remark)
    if summary.speed is None:
        yield _score("performance", "–", "", "no timed case counts")
    if (share := summary.perf_at(summary.p)) is not None:
        curve = ", ".join(
            f"{s.value:.2f} at {s.p:g}" for p in PERF_AT_P_THRESHOLDS if (s := summary.perf_at(p)) is not None
        )
        remark = f"right and at least that fast, of {len(summary.timed_units)} {summary.unit_noun}; {curve}"
        yield _score(f"perf@{share.p:g}", f"{share.value:.2f}", f"[{share.low:.2f}, {share.high:.2f}]", remark)


def _score(title: str, value: str, interval: str, remark: str) -> dict[str, str]:
    return {"title": title, "value": value, "interval": interval, "remark": remark}


def _sections(manifest: Manifest, summary: Summary) -> Iterator[dict[str, Any]]:
    """Yield facts other than verdicts, as lists of lines under titles."""
    tallies = [t for _, t in sorted(summary.operators.items())]
    missing_protections = manifest.missing_protections if manifest.confinement is not None else ()
    sections = {
        "Machine state during timing": list(speed_text.machine_notes(summary)),
        "Weak cases: mutants of ATen that pass": [
            f"{op}: {', '.join(mutants)}" for op, mutants in sorted(summary.weak_judged.items())
        ],
        "Not judged because of a bug in the baseline": [
            f"{t.unit}: {note} ({count}×)" for t in tallies for note, count in sorted(t.aten_bugs.items())
        ],
        "Protections missing on this system": list(missing_protections),
        "Remarks": list(manifest.plan.remarks),
        "Samples that could not be converted to cases": list(manifest.plan.losses),
    }
    for title, lines in sections.items():
        if lines:
            remainder = [f"… and {len(lines) - _MAX_SECTION_LINES} more"] if len(lines) > _MAX_SECTION_LINES else []
            yield {"title": title, "lines": [*lines[:_MAX_SECTION_LINES], *remainder]}


def _about(manifest: Manifest) -> Iterator[tuple[str, str]]:
    yield "command", shlex.join(manifest.command)
    yield "suite", manifest.suite
    yield "backend", manifest.backend
    yield "device", f"{manifest.device} ({(manifest.peaks or {}).get('device') or manifest.machine.platform})"
    yield "versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items() if version)
    for name, time in (("started", manifest.started), ("finished", manifest.finished)):
        if time:
            yield name, time


def _roofs(peaks: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the highest bandwidth, that of the largest working set, and arithmetic rates."""
    if not peaks or not peaks.get("bandwidth"):
        return None
    curve = [rate for _, rate in peaks["bandwidth"]]
    return {"bandwidths": {"caches": max(curve), "memory": curve[-1]}, "rates": peaks.get("rates", {})}
