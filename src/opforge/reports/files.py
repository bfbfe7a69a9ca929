"""The files of a finished run, written from its manifest and results: summary, table, failures, everything."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opforge.cache import write_atomically
from opforge.judge.verdict import Outcome
from opforge.runs.score import OperatorTally, Summary
from opforge.runs.store import read_manifest, read_rows

SUMMARY, TABLE, FAILED, FULL = "OVERALL_SUMMARY.md", "operator_summary.csv", "failed_tests.json", "full_results.json"
_SHOWN_REASONS = 3


def write_all(path: Path, summary: Summary) -> None:
    """Write the four report files of a run into its folder."""
    manifest = read_manifest(path)
    write_atomically(path / SUMMARY, overall(manifest, summary))
    _write_table(path / TABLE, summary)
    _write_json_rows(path / FAILED, (row for row in read_rows(path) if row["verdict"] != Outcome.PASSED))
    weak = summary.weak
    marked = (row | {"weak_to": weak[row["op"]]} if row["op"] in weak else row for row in read_rows(path))
    _write_json_rows(path / FULL, marked)


def overall(manifest: dict[str, Any], summary: Summary) -> str:
    """Return the summary as Markdown."""
    config, scores = manifest["config"], summary.scores()
    lines = [
        f"# {config['backend']} on {config['suite']}",
        "",
        f"`{' '.join(manifest['command'])}`",
        "",
        "| | |",
        "|---|---|",
        f"| correctness | {scores['correctness']:.4f} over {scores['operators']} operators (without a kernel: {scores['missing'] + scores['declined']}) |",
        f"| correctness of what the backend implements | {scores['correctness_of_judged']:.4f} over {scores['judged']} operators |",
        f"| coverage | {scores['coverage']:.4f} |",
        f"| performance | {performance_text(summary)} |",
        f"| cases | {scores['cases']}: {verdict_text(scores['verdicts'])} |",
        f"| torch | {manifest['versions']['torch']} on {manifest['machine']['device']}, {manifest['machine']['platform']} |",
        "",
    ]
    wrong = [t for t in summary.judged if not t.right]
    if wrong:
        lines += ["## Not right, by operator", ""]
        lines += [line for tally in wrong for line in _reasons(tally)]
    if summary.declined:
        lines += [
            "",
            "## Declined",
            "",
            "Overloads beyond a kernel's own family that it raises on: "
            + ", ".join(f"`{op}`" for op in summary.declined),
        ]
    lines += _asides(manifest, summary)
    if weak := summary.weak_judged:
        lines += ["", "## Weak cases", "", weak_text(summary), ""]
        lines += [f"- `{op}`: {', '.join(mutants)}" for op, mutants in sorted(weak.items())]
    if manifest["plan"]["losses"]:
        lines += [
            "",
            "## Samples that could not become cases",
            "",
            *[f"- {loss}" for loss in manifest["plan"]["losses"]],
        ]
    if manifest["plan"]["remarks"]:
        lines += ["", "## Remarks", "", *[f"- {remark}" for remark in manifest["plan"]["remarks"]]]
    return "\n".join(lines) + "\n"


def _asides(manifest: dict[str, Any], summary: Summary) -> Iterator[str]:
    """Yield the sections on what is worth knowing beside the verdicts."""
    tallies = [t for _, t in sorted(summary.operators.items())]
    hints = [(k["name"], k["hints"]) for k in manifest["plan"]["kernels"] if k.get("hints")]
    sections = {
        "Hints from the kernels' sources (never a verdict)": [f"`{name}`: {'; '.join(found)}" for name, found in hints],
        "ATen operators that kernels call": [
            f"`{t.op}`: {', '.join(f'{name} {count}×' for name, count in sorted(t.calls.items()))}"
            for t in tallies
            if t.calls
        ],
        "Judged by a tolerance of the dtype (no float64 form)": [
            f"`{t.op}`: {t.tolerated} of {t.total} cases" for t in tallies if t.tolerated
        ],
        "Not judged because PyTorch is at fault": [
            f"`{t.op}`: {note} ({count}×)" for t in tallies for note, count in sorted(t.defects.items())
        ],
    }
    for title, lines in sections.items():
        if lines:
            yield from ("", f"## {title}", "", *[f"- {line}" for line in lines])


def weak_text(summary: Summary) -> str:
    """Say how many judged operators have cases that let mutants through."""
    return (
        f"{len(summary.weak_judged)} of {len(summary.judged)} judged operators have cases that let mutants of ATen through, "
        "so that passing them says less; see `opforge strength`."
    )


def performance_text(summary: Summary) -> str:
    """Say the performance score and perf@p, or that nothing was timed."""
    if summary.performance is None or summary.performance_interval is None or summary.perf_at_p is None:
        return "nothing timed (no performance cases of right kernels)"
    low, high = summary.performance_interval
    return f"{summary.performance:.3f}× ATen [{low:.3f}, {high:.3f}], perf@{summary.p:g} {summary.perf_at_p:.2f}"


def verdict_text(verdicts: dict[str, int]) -> str:
    """Say how many cases got which verdict, in the order of the verdicts' list."""
    return ", ".join(f"{verdicts[o.value]} {o.value}" for o in Outcome if verdicts.get(o.value)) or "none"


def _reasons(tally: OperatorTally) -> Iterator[str]:
    yield f"- **{tally.op}** ({tally.kernel}): {tally.passed} of {tally.total} passed"
    for verdict, reason, count in tally.main_reasons(_SHOWN_REASONS):
        yield f"  - {count}× {verdict}: {reason}"
    if len(tally.reasons) > _SHOWN_REASONS:
        yield f"  - and {len(tally.reasons) - _SHOWN_REASONS} other reasons, in {FAILED}"


def _write_table(path: Path, summary: Summary) -> None:
    columns = [
        "op",
        "kernel",
        "cases",
        "passed",
        "pass_rate",
        "speedup",
        *[o.value for o in Outcome if o is not Outcome.PASSED],
    ]
    with path.open("w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(columns)
        for op, tally in sorted(summary.operators.items()):
            speedup = "" if tally.speedup is None else f"{tally.speedup:.4f}"
            counts = [tally.verdicts[o.value] for o in Outcome if o is not Outcome.PASSED]
            writer.writerow([op, tally.kernel, tally.total, tally.passed, f"{tally.pass_rate:.4f}", speedup, *counts])
        for op in summary.missing:
            writer.writerow([op, "", 0, 0, "0.0000", "", *[0] * (len(Outcome) - 1)])


def _write_json_rows(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    """Write rows as one JSON array without holding them."""
    with path.open("w") as handle:
        handle.write("[")
        for number, row in enumerate(rows):
            handle.write(",\n" if number else "\n")
            handle.write(json.dumps(row))
        handle.write("\n]\n")
