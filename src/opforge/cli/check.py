"""`opforge check`: judge registered operators on their contract, each failure with what to change."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from opforge.cli.progress import ProgressLine
from opforge.errors import OpforgeError
from opforge.reports.escape import escape_controls

if TYPE_CHECKING:
    from opforge.check import CheckReport, Finding, OperatorReport


def register(app: typer.Typer) -> None:
    app.command("check")(check)


def check(
    target: Annotated[str, typer.Argument(help="A package, its folder, a .py file, or an operator such as ns::op.")],
    import_: Annotated[
        str,
        typer.Option("--import", help="If TARGET is an operator: the package, folder or file that registers it."),
    ] = "",
    ops: Annotated[str | None, typer.Option(help="Only these operators, for example 'swiglu,my_ops::rms*'.")] = None,
    inputs: Annotated[
        str,
        typer.Option(
            help="A .py file whose inputs() returns {'ns::op': [(args, kwargs), …]}, and optionally references()."
        ),
    ] = "",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    skip: Annotated[str, typer.Option(help="Checks to leave out, for example 'autograd,vmap'.")] = "",
    timeout: Annotated[float, typer.Option(help="Time limit of one check of one operator, in seconds.")] = 60.0,
    workers: Annotated[int, typer.Option(help="Number of checks to run at once.")] = 2,
    format_: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
    brief: Annotated[bool, typer.Option("--brief", help="Failures only, without fixes and notes.")] = False,
) -> int:
    """Check the operators that TARGET registers, and show a fix for each failure; exit with 1 if there is one."""
    if format_ not in ("text", "json"):
        raise OpforgeError(f"unknown format {format_!r}; allowed: text, json")
    if ops is not None and not ops.replace(",", "").strip():
        raise OpforgeError("--ops is empty; leave it out to take all")
    from opforge import check as check_package

    options = check_package.CheckOptions(device, _split_names(ops or ""), _split_names(skip), inputs, timeout, workers)
    with ProgressLine() as progress:
        report = check_package.run_checks(check_package.parse_target(target, import_), options, progress)
    if format_ == "json":
        sys.stdout.write(json.dumps(report.as_json(), indent=2) + "\n")
    else:
        sys.stdout.write("\n".join(map(escape_controls, _lines(report, brief=brief))) + "\n")
    return report.exit_code


def _split_names(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _lines(report: CheckReport, *, brief: bool) -> list[str]:
    width = max((len(operator.name) for operator in report.operators), default=0)
    lines = [f"{report.target} ({report.device}, torch {report.versions.get('torch', '?')})"]
    lines += [f"note  {note}" for note in report.notes]
    if report.left_out:
        lines.append(f"note  left out: {', '.join(report.left_out)}")
    shown: dict[tuple[str, str], str] = {}
    for group in _with_equal_paragraphs(report):
        lines += [_headline(operator, width) for operator in group]
        lines += _paragraph(group[0], shown, brief=brief)
    counts = report.counts()
    lines.append(", ".join(f"{count} {name}" for name, count in counts.items() if count))
    return lines


def _with_equal_paragraphs(report: CheckReport) -> list[list[OperatorReport]]:
    """Group the operators that were not judged for the same reason; every other operator is a group of its own."""
    groups: dict[tuple[str, str], list[OperatorReport]] = {}
    for operator in report.operators:
        name = "" if operator.unsupported and not operator.findings else operator.name
        groups.setdefault((name, operator.unsupported), []).append(operator)
    return list(groups.values())


def _headline(operator: OperatorReport, width: int) -> str:
    from opforge.check import Status

    passed = {finding.check for finding in operator.findings_with(Status.PASSED)}
    skipped = operator.findings_with(Status.SKIPPED)
    summary = (
        f"{len(passed)} checks passed with {len(operator.calls)} calls {_input_origin(operator.origin)}"
        if passed
        else ""
    )
    left_out = f"skipped: {', '.join(finding.check for finding in skipped)}" if skipped else ""
    return f"{operator.name:{width}}  {operator.verdict:11}  {'; '.join(filter(None, (summary, left_out)))}".rstrip()


def _paragraph(operator: OperatorReport, shown: dict[tuple[str, str], str], *, brief: bool) -> list[str]:
    """Return an operator's findings; fixes and reasons that another operator has shown are not repeated."""
    from opforge.check import Status

    lines = [f"  not judged  {operator.unsupported}"] if operator.unsupported else []
    for status, label in ((Status.FAILED, "failed"), (Status.NOTE, "note  ")):
        for finding in operator.findings_with(status) if status is Status.FAILED or not brief else ():
            lines.append(f"  {label}  {finding.check:11}  {finding.what}")
            if brief or not finding.fix:
                continue
            first = shown.setdefault(_fault(operator, finding), operator.name)
            lines.append(f"    fix  {finding.fix if first == operator.name else f'as for {first}, above'}")
    if not brief:
        skipped = [f for f in operator.findings_with(Status.SKIPPED) if f.check != "blocks"]  # most are not in Triton
        new = [f for f in skipped if shown.setdefault((f.check, f.what), operator.name) == operator.name]
        lines += [f"  skipped {f.check:11}  {f.what}" for f in new]
    return lines


def _fault(operator: OperatorReport, finding: Finding) -> tuple[str, str]:
    """Return what a finding shares with the same one of another operator: its check, and the fault or the fix."""
    general = "for " not in finding.what
    return finding.check, finding.what if general else finding.fix.replace(operator.name, "")


def _input_origin(origin: str) -> str:
    return origin if origin.startswith("made") else f"from {origin}"
