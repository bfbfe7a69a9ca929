"""Output for GitHub workflows: annotations on stdout, and the step summary."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from opforge.reports.escape import escape_controls, markdown_code
from opforge.reports.run_files import verdict_counts_text
from opforge.reports.speed_text import score_lines, speed_cell
from opforge.runs.manifest import Manifest
from opforge.runs.score import OperatorTally, Summary

_MAX_ANNOTATIONS = 10
"""GitHub shows no more annotations of a kind per step."""
_MAX_SUMMARY_ROWS = 200
_MAX_SUMMARY_BYTES = 1_000_000
"""Below GitHub's limit of 1 MiB for a summary."""


def workflow_command(name: str, message: str, **properties: str) -> str:
    """Return a workflow command; its parts are escaped so that none can end it or start another."""
    property_text = ",".join(f"{key}={_escape_property(value)}" for key, value in properties.items() if value)
    return f"::{name}{' ' if property_text else ''}{property_text}::{_data(message)}\n"


def _data(text: str) -> str:
    return escape_controls(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def workflow_commands(manifest: Manifest, summary: Summary, root: Path) -> Iterator[str]:
    """Yield workflow commands for a run.

    Operators that are not right are errors at their kernel's file, alarms are warnings, and the
    scores are a notice.
    """
    files = _files(manifest, root)
    wrong = [t for t in sorted(summary.judged, key=lambda t: t.unit) if not t.is_correct]
    for tally in wrong[:_MAX_ANNOTATIONS]:
        file = files.get((tally.kernel, tally.op), "")
        yield workflow_command("error", _reasons(tally), file=file, title=f"{tally.op} ({tally.kernel}) failed")
    if len(wrong) > _MAX_ANNOTATIONS:
        yield workflow_command(
            "notice", f"and {len(wrong) - _MAX_ANNOTATIONS} more operators failed; see the step summary"
        )
    for tally, timed in summary.alarms[:_MAX_ANNOTATIONS]:
        file = files.get((tally.kernel, tally.op), "")
        yield workflow_command(
            "warning",
            f"{timed.alarm}\n{timed.case}",
            file=file,
            title=f"{tally.op}: faster than the speed of light (SOL)",
        )
    yield workflow_command("notice", scores_text(summary), title=f"{manifest.backend} on {manifest.suite}")


def _files(manifest: Manifest, root: Path) -> dict[tuple[str, str], str]:
    """Return the kernels' files relative to the repository; files outside of it are left out."""
    paths = {}
    for kernel in manifest.plan.kernels:
        file = Path(kernel.file or "/")
        if file.is_relative_to(root):
            paths.update({(kernel.name, op): str(file.relative_to(root)) for op in kernel.ops})
    return paths


def _reasons(tally: OperatorTally) -> str:
    lines = [f"{tally.passed} of {tally.total} cases passed"]
    lines += [f"{count}× {verdict}: {reason[:600]}" for verdict, reason, count in tally.main_reasons(3)]
    return "\n".join(lines)


def scores_text(summary: Summary) -> str:
    """Return the scores as text, first verdicts, then speeds."""
    scores = summary.scores()
    right = (
        f"{scores['right']} of {scores['operators']} {summary.unit_noun} right, {scores['missing']} without a kernel"
    )
    return "\n".join(
        [f"{right}; cases: {verdict_counts_text(scores['verdicts'])}", *(text for _, text in score_lines(summary))]
    )


def step_summary(manifest: Manifest, summary: Summary) -> str:
    """Return a run as Markdown for a step summary: scores, then operators, failing ones first."""
    lines = [
        f"## opforge: {markdown_code(manifest.backend)} on {markdown_code(manifest.suite)} ({manifest.device})",
        "",
    ]
    lines += [f"- {text}" for text in scores_text(summary).splitlines()]
    lines += ["", f"| operator | kernel | passed | × {summary.baseline} | reason |", "|---|---|---|---|---|"]
    tallies = sorted(summary.judged, key=lambda t: (t.is_correct, t.unit))
    for t in tallies[:_MAX_SUMMARY_ROWS]:
        reason = "" if t.is_correct else markdown_code("; ".join(f"{n}× {v}: {r}" for v, r, n in t.main_reasons(2)))
        passed = f"{'✅' if t.is_correct else '❌'} {t.passed}/{t.total}"
        lines.append(f"| {markdown_code(t.op)} | {markdown_code(t.kernel)} | {passed} | {speed_cell(t)} | {reason} |")
    if len(tallies) > _MAX_SUMMARY_ROWS:
        lines += ["", f"… and {len(tallies) - _MAX_SUMMARY_ROWS} more"]
    if summary.missing:
        lines += ["", f"Without a kernel: {', '.join(map(markdown_code, summary.missing[:_MAX_SUMMARY_ROWS]))}"]
    return "\n".join(lines).encode()[:_MAX_SUMMARY_BYTES].decode(errors="ignore") + "\n"


def append_step_summary(text: str) -> None:
    """Append Markdown to the step summary, if there is one (``GITHUB_STEP_SUMMARY``)."""
    if path := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(path).open("a", encoding="utf-8") as handle:
            handle.write(text)


def workspace() -> Path:
    """Return the repository's folder in a workflow, or else the working directory."""
    return Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd()).resolve()
