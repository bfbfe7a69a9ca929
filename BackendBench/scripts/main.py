"""``python -m BackendBench.scripts.main …`` and ``python BackendBench/scripts/main.py …`` are `opforge run …`.

Options of BackendBench that `opforge run` lacks are translated; one line on stderr explains each without an equivalent.
"""

import argparse
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

if not __package__:  # run as a file: its own folder is on the path, the checkout is not
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import BackendBench  # noqa: F401  # finds opforge in a checkout
from opforge.cli.generation import BACKENDS_BY_OPTION, LLM_BACKENDS
from opforge.cli.main import call

_REPORTS = ("OVERALL_SUMMARY.md", "operator_summary.csv", "full_results.json", "failed_tests.json")
_LLM_OPTIONS = ("dsl", "llm_attempts", "llm_model", "kernel_agent_workers", "kernel_agent_max_rounds")
"""Options that BackendBench takes with any backend, and opforge only where they have an effect."""


def cli() -> None:
    """Run the command line, and exit with its code."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: list[str]) -> int:
    """Run `opforge run` with arguments of BackendBench's or of its own; return the exit code."""
    with _translated(arguments) as words:
        return call(["run", *words])


@contextlib.contextmanager
def _translated(arguments: list[str]) -> Iterator[list[str]]:
    """Yield the arguments of `opforge run`; afterwards copy or remove results, as BackendBench's options say."""
    options, words = _parser().parse_known_args(arguments)
    if options.log_level is not None:
        _explain("--log-level", "opforge keeps no log; progress and problems go to stderr, results to stdout")
    if options.daemon is not None:
        name = "--daemon" if options.daemon else "--no-daemon"
        _explain(name, "it has no effect: every kernel runs in a confined process of its own")
    if options.check_overhead_dominated_ops:
        _explain("--check-overhead-dominated-ops", "all cases are judged; launch-bound ones have a score of their own")
    words += _suite(options.suite, options.alternative_torchbench_data_path)
    words += _option("backend", options.backend)
    words += [word for name in _LLM_OPTIONS for word in _llm_option(name, getattr(options, name), options.backend)]
    words += _option("workers", options.num_workers)
    words += _option("topn", options.topn_inputs)
    with contextlib.ExitStack() as stack:
        if options.disable_output_logs:
            out = stack.enter_context(tempfile.TemporaryDirectory(prefix="opforge-run-"))
            _explain("--disable-output-logs", "the folder of the results is removed at the end")
            words += _option("out", out)
        elif options.log_dir is not None:
            words += _option("out", _folder_for(Path(options.log_dir), stack))
        yield words


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("suite", "backend", "log-level", "num-workers", "alternative-torchbench-data-path", "log-dir"):
        parser.add_argument(f"--{name}")
    for name in _LLM_OPTIONS:
        parser.add_argument(f"--{name.replace('_', '-')}")
    parser.add_argument("--topn-inputs", "--topn")
    parser.add_argument("--daemon", action=argparse.BooleanOptionalAction)
    parser.add_argument("--check-overhead-dominated-ops", action="store_true")
    parser.add_argument("--disable-output-logs", action="store_true")
    return parser


def _suite(suite: str | None, data: str | None) -> list[str]:
    if suite == "facto":
        _explain("--suite facto", "opforge judges the suite opinfo instead, with hostile variants of each case")
        suite = "opinfo"
    if data is not None:
        if suite == "torchbench":
            return _option("suite", Path(data).absolute())
        _explain("--alternative-torchbench-data-path", f"it has no effect with --suite {suite or 'smoke'}")
    return _option("suite", suite)


def _llm_option(name: str, value: str | None, backend: str | None) -> list[str]:
    if value is None or backend in BACKENDS_BY_OPTION.get(name, LLM_BACKENDS):
        return _option(name, value)
    _explain(f"--{name.replace('_', '-')}", f"it has no effect with --backend {backend or 'aten'}")
    return []


def _folder_for(log_dir: Path, stack: contextlib.ExitStack) -> Path:
    """Return the folder of the run: BackendBench overwrites the results in a folder, and opforge never does."""
    if not log_dir.exists() or not any(log_dir.iterdir()):
        return log_dir
    Path("opforge-runs").mkdir(exist_ok=True)
    run = Path(tempfile.mkdtemp(prefix=f"{log_dir.name}-", dir="opforge-runs"))
    _explain("--log-dir", f"{log_dir} is not empty; the run goes to {run}, and its reports are copied to {log_dir}")
    stack.callback(_copy_reports, run, log_dir)
    return run


def _copy_reports(run: Path, log_dir: Path) -> None:
    for name in _REPORTS:
        if (run / name).exists():
            shutil.copyfile(run / name, log_dir / name)


def _option(name: str, value: object) -> list[str]:
    return [] if value is None else [f"--{name.replace('_', '-')}", str(value)]


def _explain(option: str, effect: str) -> None:
    sys.stderr.write(f"{option}: {effect}\n")


if __name__ == "__main__":
    cli()
