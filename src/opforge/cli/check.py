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
    from opforge.check import CheckReport, OperatorReport


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
        sys.stdout.write("\n".join(map(escape_controls, _lines(report))) + "\n")
    return report.exit_code


def _split_names(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _lines(report: CheckReport) -> list[str]:
    width = max((len(operator.name) for operator in report.operators), default=0)
    lines = [f"{report.target} ({report.device}, torch {report.versions.get('torch', '?')})"]
    lines += [f"note  {note}" for note in report.notes]
    if report.left_out:
        lines.append(f"note  left out: {', '.join(report.left_out)}")
    for operator in report.operators:
        lines += _operator(operator, width)
    counts = report.counts()
    lines.append(", ".join(f"{count} {name}" for name, count in counts.items() if count))
    return lines


def _operator(operator: OperatorReport, width: int) -> list[str]:
    from opforge.check import Status

    passed = {finding.check for finding in operator.findings_with(Status.PASSED)}
    skipped = operator.findings_with(Status.SKIPPED)
    summary = (
        f"{len(passed)} checks passed with {len(operator.calls)} calls {_input_origin(operator.origin)}"
        if passed
        else ""
    )
    if skipped:
        summary += f"; skipped: {', '.join(finding.check for finding in skipped)}"
    lines = [f"{operator.name:{width}}  {operator.verdict:11}  {summary}".rstrip()]
    if operator.unsupported:
        lines.append(f"  not judged  {operator.unsupported}")
    for finding in operator.findings_with(Status.FAILED):
        lines.append(f"  failed  {finding.check:11}  {finding.what}")
        lines += [f"    fix  {finding.fix}"] if finding.fix else []
    for finding in operator.findings_with(Status.NOTE):
        lines.append(f"  note    {finding.check:11}  {finding.what}")
        lines += [f"    fix  {finding.fix}"] if finding.fix else []
    return lines


def _input_origin(origin: str) -> str:
    return origin if origin.startswith("made") else f"from {origin}"
