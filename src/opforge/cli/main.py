"""The `opforge` command."""

from __future__ import annotations

import functools
import os
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.main import get_command

from opforge.errors import DiskFullError, OpforgeError, is_disk_full
from opforge.procs import linux

app = typer.Typer(
    name="opforge",
    help="Write, check, time and ship PyTorch operator kernels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from opforge import __version__

        sys.stdout.write(f"opforge {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,  # shown by its callback
) -> None:
    """Write, check, time and ship PyTorch operator kernels."""


_VERBS = (
    "run",
    "time",
    "trace",
    "model",
    "ls",
    "setup",
    "report",
    "view",
    "reproduce",
    "compare",
    "leaderboard",
    "query",
    "strength",
    "new",
    "add_op",
    "check",
    "build",
    "pack",
    "doctor",
    "warm",
    "serve",
    "mcp",
    "skill",
    "edge",
)
"""In the order in which the help shows them; each is a module that adds itself."""


_NEVER_SUGGESTED = ("--no-confine", "--allow-fallback")
"""Options that weaken a verdict: nobody should get them by a typing error."""


def _register() -> None:
    for verb in _VERBS:
        import_module(f"opforge.cli.{verb}").register(app)


_register()


@functools.cache
def _command() -> Any:
    """Return the parser of the command line; making it takes longer than parsing."""
    return get_command(app)


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit with its code."""
    sys.exit(call(arguments))


def call(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    if backend := linux.remove_kernel_variables():
        sys.stderr.write(f"opforge: OPFORGE_BACKEND={backend} is ignored here: kernels are compared with ATen\n")
    try:
        result: Any = _command().main(args=arguments, prog_name="opforge", standalone_mode=False)
    except OpforgeError as error:
        sys.stderr.write(f"opforge: {error}\n")
        return error.exit_code
    except typer.Exit as error:
        return int(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("opforge: interrupted\n")
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader of our output has gone
        return 141
    except Exception as error:  # noqa: BLE001  # last resort: the exit code says whose fault it is
        if isinstance(error, OSError) and is_disk_full(error):
            sys.stderr.write(f"opforge: {DiskFullError(error)}\n")
            return DiskFullError.exit_code
        if (show := getattr(error, "show", None)) is None:  # not a usage error of the parser's
            import traceback

            traceback.print_exc()
            sys.stderr.write("opforge: internal error; please report it with the traceback above\n")
            return 3
        if suggested := getattr(error, "possibilities", None):
            error.possibilities = [name for name in suggested if name not in _NEVER_SUGGESTED]  # type: ignore[attr-defined]
        show()
        return int(getattr(error, "exit_code", 2))
    return result if isinstance(result, int) else 0
