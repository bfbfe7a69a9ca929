"""Files of a finished run, from its manifest and results: summary, table, failures, all rows."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opforge.cache import write_atomically
from opforge.judge.verdict import VerdictKind
from opforge.reports import implementations, speed_text
from opforge.reports.escape import MAX_FULL_TEXT_CHARS, markdown_code, one_line
from opforge.reports.page import write_page
from opforge.runs.manifest import Manifest
from opforge.runs.score import PERF_AT_P_THRESHOLDS, OperatorTally, Summary
from opforge.runs.store import read_manifest, read_rows

SUMMARY, TABLE, FAILED, FULL = "OVERALL_SUMMARY.md", "operator_summary.csv", "failed_tests.json", "full_results.json"
_MAX_SHOWN_REASONS = 3
_SPEEDUP_NOTE = "Speedups over {} with their 95 % intervals; only right kernels are timed."


def write_reports(path: Path, summary: Summary) -> None:
    """Write the report files of a run, and its page, into its folder."""
    manifest = read_manifest(path)
    write_atomically(path / SUMMARY, summary_markdown(manifest, summary))
    _write_table(path / TABLE, summary)
    _write_json_rows(path / FAILED, (row.wire() for row in read_rows(path) if row.verdict != VerdictKind.PASSED))
    weak = summary.weak
    marks = {op: {"weak_to": mutants} for op, mutants in weak.items()}
    _write_json_rows(path / FULL, (row.wire() | marks.get(row.op, {}) for row in read_rows(path)))
    write_page(path, manifest, summary)


def summary_markdown(manifest: Manifest, summary: Summary) -> str:
    """Return the summary as Markdown."""
    scores = summary.scores()
    without = scores["missing"] + scores["declined"]
    lines = [
        f"# {manifest.backend} on {manifest.suite}",
        "",
        markdown_code(" ".join(manifest.command), MAX_FULL_TEXT_CHARS),
        "",
        "| | |",
        "|---|---|",
        (
            f"| correctness | {scores['correctness']:.4f} over {scores['operators']} {summary.unit_noun} (without a "
            f"kernel: {without}) |"
        ),
        (
            f"| correctness of what the backend implements | {scores['correctness_of_judged']:.4f} over "
            f"{scores['judged']} {summary.unit_noun} |"
        ),
        f"| coverage | {scores['coverage']:.4f} |",
        *[f"| {title} | {text} |" for title, text in speed_text.score_lines(summary)],
        *_perf_at_p_row(summary),
        f"| cases | {scores['cases']}: {verdict_counts_text(scores['verdicts'])} |",
        *([] if manifest.activity is None else [f"| time of all workers | {manifest.activity} |"]),
        f"| torch | {manifest.versions['torch']} on {manifest.machine.device}, {manifest.machine.platform} |",
        *_overrides_row(manifest),
        "",
        *_alarm_section(summary),
    ]
    wrong = [t for t in summary.judged if not t.is_correct]
    if wrong:
        lines += ["## Failures by operator", ""]
        lines += [line for tally in wrong for line in _reasons(tally)]
    if summary.declined:
        lines += [
            "",
            "## Declined",
            "",
            "Overloads outside the kernel's own family on which it raises: "
            + ", ".join(f"`{op}`" for op in summary.declined),
        ]
    lines += _comparison(manifest, summary)
    lines += _times(summary)
    lines += _extra_sections(manifest, summary)
    if weak := summary.weak_judged:
        lines += ["", "## Weak cases", "", weak_text(summary), ""]
        lines += [f"- `{op}`: {', '.join(mutants)}" for op, mutants in sorted(weak.items())]
    if manifest.plan.losses:
        lines += [
            "",
            "## Samples that could not be converted to cases",
            "",
            *[f"- {one_line(loss, MAX_FULL_TEXT_CHARS)}" for loss in manifest.plan.losses],
        ]
    if manifest.plan.remarks:
        lines += [
            "",
            "## Remarks",
            "",
            *[f"- {one_line(remark, MAX_FULL_TEXT_CHARS)}" for remark in manifest.plan.remarks],
        ]
    return "\n".join(lines) + "\n"


def _perf_at_p_row(summary: Summary) -> Iterator[str]:
    """Yield the row of perf@p at other speedups."""
    shares = [share for p in PERF_AT_P_THRESHOLDS if (share := summary.perf_at(p)) is not None]
    if shares:
        yield f"| perf@p | {', '.join(speed_text.share_text(share) for share in shares)} |"


def _overrides_row(manifest: Manifest) -> Iterator[str]:
    """Yield the row of operators that kernels were not compared with ATen's own kernel of."""
    if ops := manifest.machine.overridden_by_torch:
        yield f"| overridden by torch from Python (torch._native) | {', '.join(ops)} |"


def _alarm_section(summary: Summary) -> Iterator[str]:
    """Yield the section on cases faster than the speed of light; a fault, so it comes first."""
    alarms = list(speed_text.alarm_lines(summary))
    if alarms:
        yield from ("## ALARM: faster than the speed of light (SOL)", "")
        yield "These cases are no records and count in no score of speed. A kernel, a formula or the timing is wrong."
        yield from ("", *[f"- **{who}**: {alarm}: `{case}`" for who, alarm, case in alarms], "")


def _comparison(manifest: Manifest, summary: Summary) -> Iterator[str]:
    """Yield the table that compares the implementations of each custom operator."""
    rows = implementations.compare_implementations(manifest, summary)
    if not rows:
        return
    yield from ("", "## Implementations compared", "")
    yield (
        "Speedups with their 95 % intervals: over the reference, and over the fastest right implementation of the "
        "operator."
    )
    yield from ("", "| operator | implementation | passed | verdict | reference | × reference | × fastest |")
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        t = row.tally
        verdict = "right" if t.is_correct else verdict_counts_text(t.verdicts)
        cells = [
            markdown_code(t.op),
            markdown_code(t.kernel),
            f"{t.passed}/{t.total}",
            verdict,
            markdown_code(row.reference),
        ]
        yield f"| {' | '.join([*cells, speed_text.speed_cell(t), row.fastest_cell])} |"


def _times(summary: Summary) -> Iterator[str]:
    """Yield the table of speeds, and remarks on the machine that measured them."""
    timed = [t for _, t in sorted(summary.operators.items()) if t.times]
    if not timed:
        return
    yield from ("", "## Times", "", _SPEEDUP_NOTE.format(summary.reference_name), "")
    yield (
        f"| operator | kernel | timed | × {summary.baseline} | call × {summary.baseline} | % of SOL "
        f"({summary.baseline}) | |"
    )
    yield "|---|---|---|---|---|---|---|"
    for t in timed:
        cells = [
            markdown_code(t.op),
            markdown_code(t.kernel),
            str(len(t.times)),
            speed_text.speed_cell(t),
            speed_text.call_cell(t),
            speed_text.sol_cell(t),
        ]
        yield f"| {' | '.join([*cells, speed_text.timing_remarks(t)])} |"
    if remarks := list(speed_text.machine_notes(summary)):
        yield from ("", "## Machine state during timing", "", *[f"- {remark}" for remark in remarks])


def _extra_sections(manifest: Manifest, summary: Summary) -> Iterator[str]:
    """Yield the sections with facts other than verdicts."""
    tallies = [t for _, t in sorted(summary.operators.items())]
    sections = {
        "Hints from the kernels' sources (not part of the verdict)": [
            f"{markdown_code(k.name)}: {one_line('; '.join(k.hints))}" for k in manifest.plan.kernels if k.hints
        ],
        "ATen operators that kernels call": [
            f"`{t.op}`: {one_line(', '.join(f'{name} {count}×' for name, count in sorted(t.calls.items())), 1000)}"
            for t in tallies
            if t.calls
        ],
        "Judged by a tolerance of the dtype (no float64 form)": [
            f"`{t.unit}`: {t.tolerated} of {t.total} cases" for t in tallies if t.tolerated
        ],
        f"Not judged because of a bug in {summary.reference_name if summary.separate_kernels else 'PyTorch'}": [
            f"{markdown_code(t.unit)}: {one_line(note)} ({count}×)"
            for t in tallies
            for note, count in sorted(t.aten_bugs.items())
        ],
    }
    for title, lines in sections.items():
        if lines:
            yield from ("", f"## {title}", "", *[f"- {line}" for line in lines])


def weak_text(summary: Summary) -> str:
    """Say how many judged operators have cases that let mutants pass."""
    return (
        f"{len(summary.weak_judged)} of {len(summary.judged)} judged operators have weak cases: "
        "mutants of ATen pass them; see `opforge strength`."
    )


def verdict_counts_text(verdicts: dict[str, int]) -> str:
    """Return the number of cases for each verdict, in the order of ``Outcome``."""
    return ", ".join(f"{verdicts[o.value]} {o.value}" for o in VerdictKind if verdicts.get(o.value)) or "none"


def _reasons(tally: OperatorTally) -> Iterator[str]:
    yield f"- **{tally.op}** ({markdown_code(tally.kernel)}): {tally.passed} of {tally.total} passed"
    for verdict, reason, count in tally.main_reasons(_MAX_SHOWN_REASONS):
        yield f"  - {count}× {verdict}: {markdown_code(reason, MAX_FULL_TEXT_CHARS)}"
    if len(tally.reasons) > _MAX_SHOWN_REASONS:
        yield f"  - and {len(tally.reasons) - _MAX_SHOWN_REASONS} other reasons, in {FAILED}"


def _write_table(path: Path, summary: Summary) -> None:
    columns = [
        "op",
        "kernel",
        "cases",
        "passed",
        "pass_rate",
        "speedup",
        *[o.value for o in VerdictKind if o is not VerdictKind.PASSED],
        *speed_text.operator_fields(None),
    ]
    with path.open("w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(columns)
        for _, tally in sorted(summary.operators.items()):
            speedup = _cell(tally.speedup)
            counts = [str(tally.verdicts[o.value]) for o in VerdictKind if o is not VerdictKind.PASSED]
            counts += [_cell(value) for value in speed_text.operator_fields(tally).values()]
            writer.writerow(
                [tally.op, tally.kernel, tally.total, tally.passed, f"{tally.pass_rate:.4f}", speedup, *counts]
            )
        for op in summary.missing:
            empty_cells = [_cell(value) for value in speed_text.operator_fields(None).values()]
            writer.writerow([op, "", 0, 0, "0.0000", "", *[0] * (len(VerdictKind) - 1), *empty_cells])


def _cell(value: speed_text.Cell) -> str:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def _write_json_rows(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    """Write rows as one JSON array without keeping them in memory."""
    with path.open("w") as handle:
        handle.write("[")
        for number, row in enumerate(rows):
            handle.write(",\n" if number else "\n")
            handle.write(json.dumps(row))
        handle.write("\n]\n")
