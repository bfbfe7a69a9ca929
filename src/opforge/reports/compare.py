"""Comparison of two runs: for the terminal, for a pull request, as JSON, as JUnit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from opforge.reports import junit
from opforge.reports.plain import code, one_line
from opforge.reports.speed import ratio_text
from opforge.runs.change import FALSE_ALARM
from opforge.runs.comparable import device_name, suite_words
from opforge.runs.compare import Became, CaseChange, Comparison, Difference
from opforge.runs.speed import Ratio

_WORDS = {
    Became.WRONG: "became wrong",
    Became.DISAPPEARED: "disappeared",
    Became.SLOWER: "slower",
    Became.RIGHT: "became right",
    Became.FASTER: "faster",
    Became.APPEARED: "appeared",
}
_COLOURS = {Became.WRONG: "red", Became.DISAPPEARED: "red", Became.SLOWER: "red"}
_MAX_SHOWN_CASES = 3
_SCORE_TITLES = {
    "correctness": "correctness",
    "coverage": "coverage",
    "performance": "performance",
    "perf_at_p": "perf@p",
}


def show(console: Console, comparison: Comparison, share: float | None) -> None:
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
    worse = comparison.regressions(share)
    console.print(f"[{'red' if worse else 'green'}]{escape(verdict(comparison, share))}[/]", soft_wrap=True)


def asked_text(share: float | None) -> str:
    """Return what counts as a regression."""
    return "wrong or gone" if share is None else f"wrong, gone or surely more than {share * 100:g} % slower"


def verdict(comparison: Comparison, share: float | None) -> str:
    """Return whether there is a regression, and where."""
    worse = comparison.regressions(share)
    if not worse:
        return f"no regression: nothing is {asked_text(share)}"
    return f"regression ({asked_text(share)}): {', '.join(one_line(d.unit) for d in worse)}"


def _table(comparison: Comparison) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("", comparison.things.removesuffix("s"), "before", "after", "change of speed"):
        table.add_column(title, overflow="fold")
    for d in comparison.differences:
        style = _COLOURS.get(d.became, "green")
        table.add_row(f"[{style}]{_WORDS[d.became]}[/]", *(escape(cell) for cell in _cells(d)))
    return table


def _cells(d: Difference) -> tuple[str, str, str, str]:
    before, after, change = d.before, d.after, ""
    if d.speeds is not None and d.became in (Became.SLOWER, Became.FASTER):
        before, after = (f"{ratio_text(r)}" for r in (d.speeds.before, d.speeds.after))
        change = ratio_text(d.speeds.change) + (f" (n={d.speeds.cases})" if d.speeds.cases > 1 else "")
    return one_line(d.unit), before, after, change


def _details(d: Difference) -> Iterator[str]:
    """Yield the details of one operator beside its row."""
    for verdict_, reason, case in d.reasons[:_MAX_SHOWN_CASES]:
        yield f"{verdict_}: {one_line(reason)}  in  {one_line(case, 160)}"
    if d.failing > _MAX_SHOWN_CASES and d.reasons:
        yield f"and {d.failing - _MAX_SHOWN_CASES} more cases that failed in the second run only"
    if d.speeds is not None and d.became in (Became.SLOWER, Became.FASTER):
        changed_cases = d.speeds.slower + d.speeds.faster
        for c in changed_cases[:_MAX_SHOWN_CASES]:
            yield f"{_direction(c)} {ratio_text(c.change)}  in  {one_line(c.case, 160)}"
        if len(changed_cases) > _MAX_SHOWN_CASES:
            yield f"and {len(changed_cases) - _MAX_SHOWN_CASES} more cases that have surely changed"


def _direction(c: CaseChange) -> str:
    return "slower" if c.change.value < 1 else "faster"


def _suite_and_device(comparison: Comparison) -> str:
    manifest = comparison.manifests[0]
    return f"{suite_words(manifest)}; {device_name(manifest)}"


def _notes(comparison: Comparison) -> Iterator[str]:
    """Yield how much the comparison can show, and what else has changed."""
    yield _counts(comparison)
    yield from (f"{name} {text}" for name, text in _scores(comparison))
    if comparison.raced:
        yield _noise(comparison)
    if comparison.unseen is not None:
        yield f"a typical {comparison.things.removesuffix('s')} would have to be {comparison.unseen * 100:.0f} % slower to be named here"
    if comparison.moved is not None:
        unit, ratio = comparison.moved
        yield f"of what has not changed, {one_line(unit)} differs most between the runs: {ratio_text(ratio)}"
    yield from (f"note: {one_line(remark)}" for remark in comparison.remarks)


def _counts(comparison: Comparison) -> str:
    counts = [f"{len(comparison.of(b))} {_WORDS[b]}" for b in Became if comparison.of(b)]
    return f"{comparison.units} {comparison.things} in either run: {', '.join(counts) or 'none has changed as far as can be told'}"


def _noise(comparison: Comparison) -> str:
    noise = comparison.noise["operators"]
    basis = (
        f"learnt from {noise.controls} that have not changed" if noise.controls else "assumed, for few are unchanged"
    )
    return (
        f"noise between the runs {noise.deviation * 100:.1f} % ({basis}); intervals hold for all "
        f"{comparison.tests} questions at once, {(1 - FALSE_ALARM) * 100:g} % of the time"
    )


def _scores(comparison: Comparison) -> Iterator[tuple[str, str]]:
    before, after = comparison.scores
    for name, title in _SCORE_TITLES.items():
        if before.get(name) is not None and after.get(name) is not None:
            yield title, f"{_score(before, name)} → {_score(after, name)}"


def _score(scores: dict[str, Any], name: str) -> str:
    interval = scores.get(f"{name}_interval")
    return f"{scores[name]:.4f}" + ("" if interval is None else f" [{interval[0]:.4f}, {interval[1]:.4f}]")


def markdown(comparison: Comparison, share: float | None) -> str:
    """Return a comparison for a pull request."""
    worse = comparison.regressions(share)
    head = (
        f"❌ {asked_text(share)}: {', '.join(code(d.unit) for d in worse)}"
        if worse
        else f"✅ {verdict(comparison, share)}"
    )
    lines = [
        f"### opforge: {head}",
        "",
        f"{code(comparison.paths[1])} against {code(comparison.paths[0])}: {code(_suite_and_device(comparison))}",
    ]
    if comparison.differences:
        lines += [
            "",
            f"| | {comparison.things.removesuffix('s')} | before | after | change of speed |",
            "|---|---|---|---|---|",
        ]
    for d in comparison.differences:
        unit, *cells = _cells(d)
        lines.append(f"| {_WORDS[d.became]} | {code(unit)} | {' | '.join(cells)} |")
    details = [f"- {code(d.unit)}: {code(line, 600)}" for d in comparison.differences for line in _details(d)]
    lines += ["", "<details><summary>Cases</summary>", "", *details, "", "</details>"] if details else []
    lines += ["", *[f"- {code(line, 600) if line.startswith('note: ') else line}" for line in _notes(comparison)]]
    return "\n".join(lines) + "\n"


def as_json(comparison: Comparison, share: float | None) -> dict[str, Any]:
    """Return a comparison as data."""
    before, after = comparison.manifests
    return {
        "before": comparison.paths[0],
        "after": comparison.paths[1],
        "suite": before["plan"].get("suite"),
        "suite_digest": before["plan"].get("suite_digest"),
        "device": device_name(before),
        "torch": [before["versions"]["torch"], after["versions"]["torch"]],
        "units": comparison.units,
        "raced": comparison.raced,
        "tests": comparison.tests,
        "false_alarm": FALSE_ALARM,
        "unseen": comparison.unseen,
        "noise": {name: {"deviation": n.deviation, "controls": n.controls} for name, n in comparison.noise.items()},
        "moved": None
        if comparison.moved is None
        else {"op": comparison.moved[0], "change": _ratio(comparison.moved[1])},
        "scores": {"before": comparison.scores[0], "after": comparison.scores[1]},
        "remarks": list(comparison.remarks),
        "fail_on_regression": share,
        "regressions": [d.unit for d in comparison.regressions(share)],
        "differences": [_as_json(d) for d in comparison.differences],
    }


def _as_json(d: Difference) -> dict[str, Any]:
    row: dict[str, Any] = {
        "op": d.unit,
        "became": d.became.value,
        "before": d.before,
        "after": d.after,
        "same_source": d.unchanged,
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


def as_junit(comparison: Comparison, share: float | None) -> Iterator[str]:
    """Yield a comparison as JUnit: one test for the whole, and one for each change.

    The test of a change fails if it is a regression.
    """
    worse = {d.unit for d in comparison.regressions(share)}
    cases = [
        junit.TestCase(
            "opforge.compare",
            "no regression",
            "failure" if worse else "",
            "regression",
            verdict(comparison, share) if worse else "",
        )
    ]
    for d in comparison.differences:
        name = f"{d.unit} {_WORDS[d.became]}"
        text = "\n".join([" → ".join(filter(None, _cells(d)[1:])), *_details(d)])
        cases.append(
            junit.TestCase("opforge.compare", name, "failure" if d.unit in worse else "", d.became.value, text)
        )
    return junit.document(f"{comparison.paths[1]} against {comparison.paths[0]}", cases, junit.counted(cases))
