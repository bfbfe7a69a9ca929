"""Comparison of two runs: for the terminal, for a pull request, as JSON, as JUnit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from opforge.reports import junit
from opforge.reports.escape import markdown_code, one_line
from opforge.reports.speed_text import ratio_text
from opforge.runs.compare.comparison import CaseChange, ChangeKind, Difference, RunComparison
from opforge.runs.compare.compatible import describe_suite, device_name
from opforge.runs.compare.significance import FALSE_ALARM
from opforge.runs.speed import Ratio

_WORDS = {
    ChangeKind.WRONG: "became wrong",
    ChangeKind.DISAPPEARED: "disappeared",
    ChangeKind.SLOWER: "slower",
    ChangeKind.RIGHT: "became right",
    ChangeKind.FASTER: "faster",
    ChangeKind.APPEARED: "appeared",
}
_COLOURS = {ChangeKind.WRONG: "red", ChangeKind.DISAPPEARED: "red", ChangeKind.SLOWER: "red"}
_MAX_SHOWN_CASES = 3
_SCORE_TITLES = {
    "correctness": "correctness",
    "coverage": "coverage",
    "performance": "performance",
    "perf_at_p": "perf@p",
}


def print_comparison(console: Console, comparison: RunComparison, max_slowdown: float | None) -> None:
    """Print a comparison."""
    before, after = comparison.paths
    console.print(f"{escape(after)} against {escape(before)}: {escape(_suite_and_device(comparison))}", soft_wrap=True)
    if comparison.differences:
        console.print(_table(comparison))
    for difference in comparison.differences:
        for line in _details(difference):
            console.print(f"  {escape(difference.unit)}: {escape(line)}", soft_wrap=True)
    for line in _notes(comparison):
        console.print(escape(line), soft_wrap=True)
    worse = comparison.regressions(max_slowdown)
    console.print(
        f"[{'red' if worse else 'green'}]{escape(regression_verdict(comparison, max_slowdown))}[/]", soft_wrap=True
    )


def regression_text(max_slowdown: float | None) -> str:
    """Return what counts as a regression."""
    if max_slowdown is None:
        return "wrong or missing"
    return f"wrong, missing or significantly more than {max_slowdown * 100:g} % slower"


def regression_verdict(comparison: RunComparison, max_slowdown: float | None) -> str:
    """Return whether there is a regression, and where."""
    worse = comparison.regressions(max_slowdown)
    if not worse:
        return f"no regression: nothing is {regression_text(max_slowdown)}"
    return f"regression ({regression_text(max_slowdown)}): {', '.join(one_line(d.unit) for d in worse)}"


def _table(comparison: RunComparison) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("", comparison.unit_noun.removesuffix("s"), "before", "after", "change of speed"):
        table.add_column(title, overflow="fold")
    for d in comparison.differences:
        style = _COLOURS.get(d.kind, "green")
        table.add_row(f"[{style}]{_WORDS[d.kind]}[/]", *(escape(cell) for cell in _cells(d)))
    return table


def _cells(d: Difference) -> tuple[str, str, str, str]:
    before, after, change = d.before, d.after, ""
    if d.speeds is not None and d.kind in (ChangeKind.SLOWER, ChangeKind.FASTER):
        before, after = (f"{ratio_text(r)}" for r in (d.speeds.before, d.speeds.after))
        change = ratio_text(d.speeds.change) + (f" (n={d.speeds.cases})" if d.speeds.cases > 1 else "")
    return one_line(d.unit), before, after, change


def _details(d: Difference) -> Iterator[str]:
    """Yield the details of one operator beside its row."""
    for verdict_, reason, case in d.reasons[:_MAX_SHOWN_CASES]:
        yield f"{verdict_}: {one_line(reason)}  in  {one_line(case, 160)}"
    if d.failing > _MAX_SHOWN_CASES and d.reasons:
        yield f"and {d.failing - _MAX_SHOWN_CASES} more cases that failed in the second run only"
    if d.speeds is not None and d.kind in (ChangeKind.SLOWER, ChangeKind.FASTER):
        changed_cases = d.speeds.slower + d.speeds.faster
        for c in changed_cases[:_MAX_SHOWN_CASES]:
            yield f"{_direction(c)} {ratio_text(c.change)}  in  {one_line(c.case, 160)}"
        if len(changed_cases) > _MAX_SHOWN_CASES:
            yield f"and {len(changed_cases) - _MAX_SHOWN_CASES} more cases with a significant change"


def _direction(c: CaseChange) -> str:
    return "slower" if c.change.value < 1 else "faster"


def _suite_and_device(comparison: RunComparison) -> str:
    manifest = comparison.manifests[0]
    return f"{describe_suite(manifest)}; {device_name(manifest)}"


def _notes(comparison: RunComparison) -> Iterator[str]:
    """Yield how much the comparison can show, and what else has changed."""
    yield _counts(comparison)
    yield from (f"{name} {text}" for name, text in _scores(comparison))
    if comparison.timed_units:
        yield _noise(comparison)
    if comparison.undetectable_change is not None:
        unit_noun = comparison.unit_noun.removesuffix("s")
        yield f"smallest detectable slowdown of a typical {unit_noun}: {comparison.undetectable_change * 100:.0f} %"
    if comparison.largest_control_change is not None:
        unit, ratio = comparison.largest_control_change
        yield f"largest difference among unchanged {comparison.unit_noun}: {one_line(unit)} {ratio_text(ratio)}"
    yield from (f"note: {one_line(remark)}" for remark in comparison.remarks)


def _counts(comparison: RunComparison) -> str:
    counts = [f"{len(comparison.of_kind(b))} {_WORDS[b]}" for b in ChangeKind if comparison.of_kind(b)]
    changes = ", ".join(counts) or "no significant change"
    return f"{comparison.units} {comparison.unit_noun} in either run: {changes}"


def _noise(comparison: RunComparison) -> str:
    noise = comparison.noise["operators"]
    basis = (
        f"estimated from {noise.control_count} unchanged {comparison.unit_noun}"
        if noise.control_count
        else f"assumed: too few unchanged {comparison.unit_noun}"
    )
    return (
        f"noise between the runs {noise.deviation * 100:.1f} % ({basis}); intervals hold for all "
        f"{comparison.tests} tests together with {(1 - FALSE_ALARM) * 100:g} % confidence"
    )


def _scores(comparison: RunComparison) -> Iterator[tuple[str, str]]:
    before, after = comparison.scores
    for name, title in _SCORE_TITLES.items():
        if before.get(name) is not None and after.get(name) is not None:
            yield title, f"{_score(before, name)} → {_score(after, name)}"


def _score(scores: dict[str, Any], name: str) -> str:
    interval = scores.get(f"{name}_interval")
    return f"{scores[name]:.4f}" + ("" if interval is None else f" [{interval[0]:.4f}, {interval[1]:.4f}]")


def markdown(comparison: RunComparison, max_slowdown: float | None) -> str:
    """Return a comparison for a pull request."""
    worse = comparison.regressions(max_slowdown)
    head = (
        f"❌ {regression_text(max_slowdown)}: {', '.join(markdown_code(d.unit) for d in worse)}"
        if worse
        else f"✅ {regression_verdict(comparison, max_slowdown)}"
    )
    lines = [
        f"### opforge: {head}",
        "",
        (
            f"{markdown_code(comparison.paths[1])} against {markdown_code(comparison.paths[0])}: "
            f"{markdown_code(_suite_and_device(comparison))}"
        ),
    ]
    if comparison.differences:
        lines += [
            "",
            f"| | {comparison.unit_noun.removesuffix('s')} | before | after | change of speed |",
            "|---|---|---|---|---|",
        ]
    for d in comparison.differences:
        unit, *cells = _cells(d)
        lines.append(f"| {_WORDS[d.kind]} | {markdown_code(unit)} | {' | '.join(cells)} |")
    details = [
        f"- {markdown_code(d.unit)}: {markdown_code(line, 600)}" for d in comparison.differences for line in _details(d)
    ]
    lines += ["", "<details><summary>Cases</summary>", "", *details, "", "</details>"] if details else []
    lines += [
        "",
        *[f"- {markdown_code(line, 600) if line.startswith('note: ') else line}" for line in _notes(comparison)],
    ]
    return "\n".join(lines) + "\n"


def as_json(comparison: RunComparison, max_slowdown: float | None) -> dict[str, Any]:
    """Return a comparison as data."""
    before, after = comparison.manifests
    return {
        "before": comparison.paths[0],
        "after": comparison.paths[1],
        "suite": before.plan.suite,
        "suite_digest": before.plan.suite_digest,
        "device": device_name(before),
        "torch": [before.versions["torch"], after.versions["torch"]],
        "units": comparison.units,
        "raced": comparison.timed_units,
        "tests": comparison.tests,
        "false_alarm": FALSE_ALARM,
        "unseen": comparison.undetectable_change,
        "noise": {
            name: {"deviation": n.deviation, "controls": n.control_count} for name, n in comparison.noise.items()
        },
        "moved": None
        if comparison.largest_control_change is None
        else {"op": comparison.largest_control_change[0], "change": _ratio(comparison.largest_control_change[1])},
        "scores": {"before": comparison.scores[0], "after": comparison.scores[1]},
        "remarks": list(comparison.remarks),
        "fail_on_regression": max_slowdown,
        "regressions": [d.unit for d in comparison.regressions(max_slowdown)],
        "differences": [_as_json(d) for d in comparison.differences],
    }


def _as_json(d: Difference) -> dict[str, Any]:
    row: dict[str, Any] = {
        "op": d.unit,
        "became": d.kind.value,
        "before": d.before,
        "after": d.after,
        "same_source": d.same_source,
        "failing": d.failing,
        "reasons": [{"verdict": v, "reason": r, "case": c} for v, r, c in d.reasons],
        "speed": None,
    }
    if d.speeds is not None:
        row["speed"] = {
            **{name: _ratio(getattr(d.speeds, name)) for name in ("before", "after", "change")},
            "cases": d.speeds.cases,
            "slower": [_case(c) for c in d.speeds.slower],
            "faster": [_case(c) for c in d.speeds.faster],
        }
    return row


def _case(c: CaseChange) -> dict[str, Any]:
    return {"case": c.case, **{name: _ratio(getattr(c, name)) for name in ("before", "after", "change")}}


def _ratio(ratio: Ratio) -> dict[str, float]:
    return {"value": ratio.value, "low": ratio.low, "high": ratio.high}


def as_junit(comparison: RunComparison, max_slowdown: float | None) -> Iterator[str]:
    """Yield a comparison as JUnit: one test for the whole, and one for each change.

    The test of a change fails if it is a regression.
    """
    worse = {d.unit for d in comparison.regressions(max_slowdown)}
    cases = [
        junit.TestCase(
            "opforge.compare",
            "no regression",
            "failure" if worse else "",
            "regression",
            regression_verdict(comparison, max_slowdown) if worse else "",
        )
    ]
    for d in comparison.differences:
        name = f"{d.unit} {_WORDS[d.kind]}"
        text = "\n".join([" → ".join(filter(None, _cells(d)[1:])), *_details(d)])
        cases.append(junit.TestCase("opforge.compare", name, "failure" if d.unit in worse else "", d.kind.value, text))
    return junit.document(f"{comparison.paths[1]} against {comparison.paths[0]}", cases, junit.count_by_status(cases))
