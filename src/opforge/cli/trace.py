"""`opforge trace`: record the operator calls of a program or an architecture, as a suite."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opforge.cases.values import parse_dtype
from opforge.cli.progress import ProgressLine
from opforge.errors import NothingToJudgeError, OpforgeError

if TYPE_CHECKING:
    from opforge.traces.record import TraceResult
    from opforge.traces.targets import Settings, Target
    from opforge.traces.trace_file import Trace


def register(app: typer.Typer) -> None:
    app.command("trace")(trace)


def trace(
    target: Annotated[
        str,
        typer.Argument(
            help="module:function, script.py, hf:CLASS (of transformers), timm:NAME or torchvision:NAME; or a trace or "
            "operator-input log to convert."
        ),
    ],
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of a script, after `--`.")] = None,
    out: Annotated[Path | None, typer.Option(help="The file to write (default: NAME.parquet).")] = None,
    to_log: Annotated[Path | None, typer.Option(help="Also write PyTorch's operator-input log to this file.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    fake: Annotated[
        bool, typer.Option("--fake", help="Use tensors without contents: a model of any size, and no computation.")
    ] = False,
    train: Annotated[
        bool, typer.Option("--train", help="For an architecture: forward, loss, backward and an optimizer step.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="For an architecture: f32, bf16 or f16.")] = "f32",
    batch: Annotated[int, typer.Option(help="For an architecture: batch size.")] = 1,
    seq: Annotated[int, typer.Option(help="For an architecture: tokens per input.")] = 128,
    image: Annotated[int | None, typer.Option(help="For an architecture: image size in pixels.")] = None,
    layers: Annotated[int | None, typer.Option(help="For an architecture: maximum number of layers.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE in an architecture's configuration. May be repeated.")
    ] = None,
    format_: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
) -> int:
    """Run a program under a recorder and write its operator calls as a suite: `opforge run --suite FILE`."""
    from opforge.traces.targets import Settings, parse_changes, parse_target

    if format_ not in ("text", "json"):
        raise OpforgeError(f"unknown format {format_!r}; allowed: text, json")
    if _is_data(target):
        return _convert(Path(target), out, to_log, as_json=format_ == "json")
    program = parse_target(target, tuple(args or ()))
    short, changes = parse_dtype(dtype), parse_changes(set_ or [])
    settings = Settings(device, fake, short, train, batch, seq, image, layers, changes).checked()
    trace, result = _record(program, settings)
    path = out or Path(f"{program.model_name.replace(':', '.').replace('/', '.')}.parquet")
    if result.error:
        path, to_log = _beside_existing(path), None if to_log is None else _beside_existing(to_log)
    _write(trace, path, to_log)
    _show(trace, path, to_log, result.error, as_json=format_ == "json")
    return result.exit_code


def _beside_existing(path: Path) -> Path:
    """Return where to write what a failed program called: an existing file stays."""
    if not path.exists():
        return path
    beside = path.with_name(f"{path.stem}.failed{path.suffix}")
    sys.stderr.write(f"opforge: {path} stays as it was, because the program failed; its calls go to {beside}\n")
    return beside


def _record(target: Target, settings: Settings) -> tuple[Trace, TraceResult]:
    from opforge.traces.collect import Collector
    from opforge.traces.record import record, recording_metadata

    collector = Collector()
    with ProgressLine() as progress:
        result = record(collector, target, settings, progress)
    trace = collector.merged_trace(recording_metadata(settings, sys.argv))
    if result.traceback:
        sys.stderr.write(result.traceback)
    if not trace.calls:
        message = f"{target.name}: {result.error or 'no operator was called'}; nothing was recorded"
        if not result.error:
            raise NothingToJudgeError(message)
        sys.stderr.write(f"opforge: {message}\n")
        raise typer.Exit(result.exit_code)
    return trace, result


def _is_data(target: str) -> bool:
    path = Path(target)
    return path.is_file() and path.suffix != ".py"


def _convert(path: Path, out: Path | None, to_log: Path | None, *, as_json: bool) -> int:
    """Convert a trace to a log, or a log to a trace."""
    from opforge.traces.formats import read_calls

    if out is None and to_log is None:
        raise OpforgeError(f"{path} is a file of calls; give --to-log FILE or --out FILE.parquet to convert it")
    trace = read_calls(path)
    _write(trace, out, to_log)
    _show(trace, out, to_log, "", as_json=as_json)
    return 0


def _write(trace: Trace, path: Path | None, to_log: Path | None) -> None:
    from opforge.traces import log, trace_file

    if path is not None:
        trace_file.write_trace(path, trace)
    if to_log is not None:
        with trace_file.atomic_path(to_log) as draft:
            draft.write_text("".join(f"{line}\n" for line in log.to_log(trace)))


def _show(trace: Trace, path: Path | None, to_log: Path | None, error: str, *, as_json: bool) -> None:
    lost = sum(trace.losses.values())
    if as_json:
        row: dict[str, Any] = {
            "calls": sum(c.count for c in trace.calls),
            "distinct": len(trace.calls),
            "operators": trace.operators,
            "lost": lost,
            "losses": trace.losses,
            "error": error,
            "out": None if path is None else str(path),
            "log": None if to_log is None else str(to_log),
        }
        sys.stdout.write(json.dumps(row, indent=2) + "\n")
        return
    from opforge.reports.trace import print_trace

    print_trace(trace, [str(p) for p in (path, to_log) if p is not None])
    if error:
        sys.stderr.write(f"opforge: {error}\n")
