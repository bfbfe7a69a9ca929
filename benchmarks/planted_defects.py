"""Whether the tests notice bugs: plants one defect after another in a copy of the checkout, and runs the tests there.

    python benchmarks/planted_defects.py --out benchmarks/results/planted-defects.md

The defects were chosen by reading the source, without looking at the tests. None of them writes anything wrong into
the cache, which the copies share with the checkout. A test that fails without a defect would seem to catch them all:
run the tests without one first.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("src", "opforge")
_FAILURE = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)
_NO_TESTS = 5
"""Pytest's exit code where the marker leaves no test."""


@dataclass(frozen=True)
class Defect:
    """One bug, as a developer might write it."""

    name: str
    file: str
    """Below src/opforge."""
    old: str
    """Stands in the file exactly once."""
    new: str
    effect: str
    """What goes wrong for the user."""
    tests: tuple[str, ...]
    """Folders and files below tests/ that are run first."""

    @property
    def package(self) -> str:
        """Return the package of the file; of a module at the top, the module."""
        return self.file.partition("/")[0]

    def changed(self, text: str) -> str:
        """Return a file's text with the defect in it; raises ValueError where the old text is not there once."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: the old text stands {count} times in {self.file}, not once")
        return text.replace(self.old, self.new)


class NotRunError(Exception):
    """Tests that ended without an answer."""


DEFECTS = (
    Defect(
        "ops-folder-of-one-form",
        "ops/operator_table.py",
        "return op.packet if op.packet in self._by_base else op.base",
        "return op.base",
        "The kernel of `relu_` is looked for in a folder of its own, and not in that of `relu`.",
        ("ops", "cli", "runs"),
    ),
    Defect(
        "cases-offset-is-zero",
        "cases/variants.py",
        "base[5 : 5 + t.numel()].view(t.shape)",
        "base[: t.numel()].view(t.shape)",
        "Kernels that ignore the storage offset of their inputs are not noticed.",
        ("cases", "judge", "honest"),
    ),
    Defect(
        "kernels-digest-stops-early",
        "kernels/source.py",
        "    while new:\n",
        "    if new:\n",
        "A change in a helper's own helper leaves the digest as it was, so an old proof still holds.",
        ("kernels/test_source.py", "kernels", "install", "runs"),
    ),
    Defect(
        "traces-other-settings-kept",
        "traces/recordings.py",
        'return RunEnd(kept["seconds"], kept["error"]) if kept["run"] == run.as_json() else None',
        'return RunEnd(kept["seconds"], kept["error"])',
        "What was recorded with other settings is taken for this recording.",
        ("traces/test_parallel.py", "traces"),
    ),
    Defect(
        "suites-forgets-result-size",
        "suites/case_selection.py",
        "max(call.input_bytes, call.result_bytes) > profile.max_bytes\n",
        "call.input_bytes > profile.max_bytes\n",
        "A call with small inputs and a huge result is judged in spite of `--max-mib`.",
        ("suites/test_trace.py", "suites/test_torchbench.py", "suites", "traces"),
    ),
    Defect(
        "backends-packet-wins",
        "backends/directory.py",
        "for kernel in sorted(kernels, key=lambda kernel: len(kernel.serves)):",
        "for kernel in kernels:",
        "The kernel in a folder for one overload is not judged where its packet has a folder too.",
        ("backends", "cli", "runs"),
    ),
    Defect(
        "sandbox-cpu-autocast-unseen",
        "sandbox/guest/global_state.py",
        'torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),',
        'torch.is_autocast_enabled("cuda"),',
        "A kernel that leaves autocast switched on for the CPU passes.",
        ("exploits", "judge/test_contract.py", "sandbox", "judge"),
    ),
    Defect(
        "sandbox-threads-not-trapped",
        "sandbox/guard/traps.py",
        "if get_ident() != self._main:\n            return True",
        "if get_ident() != self._main:\n            return False",
        "A kernel that calls the operator that it replaces in a thread without Python passes.",
        ("sandbox/test_traps.py", "exploits", "sandbox"),
    ),
    Defect(
        "judge-ignores-sign-of-infinity",
        "judge/compare/numerics.py",
        "(torch.isinf(left) & (left == right))",
        "(torch.isinf(left) & torch.isinf(right))",
        "A kernel that answers infinity with the wrong sign passes.",
        ("judge/test_numerics.py", "judge", "exploits"),
    ),
    Defect(
        "judge-alarms-by-low-peaks",
        "judge/roofline/bound.py",
        "if slow >= limit or aten_us < limit:",
        "if slow >= limit:",
        "An honest kernel is accused of being faster than light where ATen is so too.",
        ("judge/test_roofline.py", "judge"),
    ),
    Defect(
        "runs-cheater-is-proven",
        "runs/proofs.py",
        "if not void and (rows :=",
        "if (rows :=",
        "A kernel that cheated with one dtype gets a proof for the others.",
        ("runs/test_proofs.py", "runs", "install"),
    ),
    Defect(
        "runtime-compares-ranks",
        "runtime/proven_calls.py",
        "any(t.shape != tensors[0].shape for t in tensors[1:])",
        "any(t.dim() != tensors[0].dim() for t in tensors[1:])",
        "A kernel answers calls that broadcast, though it is proven for equal shapes only.",
        ("install/test_enable.py", "install", "runs"),
    ),
    Defect(
        "generate-forgets-requests-under-way",
        "generate/budget.py",
        "cost = self._spent.cost + sum(reserved.cost or 0.0 for reserved in self._reserved) + (maximum.cost or 0.0)",
        "cost = self._spent.cost + (maximum.cost or 0.0)",
        "Requests at the same time spend more than `--max-cost`.",
        ("generate",),
    ),
    Defect(
        "install-stays-after-an-error",
        "install/enabling.py",
        "    try:\n        yield installed\n    finally:\n        installed.disable()\n",
        "    yield installed\n    installed.disable()\n",
        "Kernels stay enabled after an error in a block with `enabled`.",
        ("install",),
    ),
    Defect(
        "models-accepts-lost-nan",
        "judge/compare/numerics.py",
        "bad = ~both_finite & ~same_nonfinite(k, a)",
        "bad = ~torch.isfinite(k) & ~same_nonfinite(k, a)",
        "A kernel that puts numbers in the place of a model's NaN passes.",
        ("models", "cli/test_model.py"),
    ),
    Defect(
        "reports-declined-as-failures",
        "reports/junit.py",
        "counts[names[_status(verdict, tally.op in declined)]] += count",
        "counts[names[_status(verdict, False)]] += count",
        "The head of a JUnit report counts overloads as failures that a kernel may decline.",
        ("reports", "cli"),
    ),
    Defect(
        "authoring-batches-everything",
        "check/vmap.py",
        '    if count > 1:\n        variants["the first batched"] = (0, *(None,) * (count - 1))\n',
        "",
        "A vmap rule that goes wrong where only one argument is batched passes `opforge check`.",
        ("check/test_check.py", "check"),
    ),
    Defect(
        "edge-allows-same-names",
        "edge/bindings.py",
        'bare = entry.name.partition("::")[2]',
        "bare = entry.name",
        "Two operators of one name in two namespaces are let through, and ExecuTorch mixes them up.",
        ("edge/test_bindings.py", "edge"),
    ),
    Defect(
        "cli-forgets-termination",
        "cli/run.py",
        "        if isinstance(interrupt, Terminated):\n            raise typer.Exit(SIGTERM_EXIT_CODE) from None\n",
        "",
        "A run that SIGTERM has ended exits with 130, as after Ctrl-C, and not with 143.",
        ("runs/test_resume.py", "cli", "runs"),
    ),
    Defect(
        "cache-broken-file-is-fatal",
        "cache.py",
        "except (OSError, ValueError, RecursionError):",
        "except OSError:",
        "Half a file in the cache makes commands fail instead of being made again.",
        ("test_cache.py", "ops", "judge"),
    ),
)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Plant defects, and see whether the tests notice them.")
    names = [defect.name for defect in DEFECTS]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help="this defect; may be repeated")
    parser.add_argument("--check", action="store_true", help="only see that each defect can be planted and compiles")
    parser.add_argument("--marker", default="not gpu and not slow", help="pytest's -m")
    parser.add_argument("--out", type=Path, help="write the table to this file")
    parser.add_argument("--workers", type=int, default=2, help="pytest's -n")
    parser.add_argument("--narrow", action="store_true", help="run the named tests only, and never the whole set")
    options = parser.parse_args()
    chosen = [defect for defect in DEFECTS if not options.only or defect.name in options.only]
    if options.check:
        check(chosen)
        return 0
    control()
    with contextlib.nullcontext(sys.stdout) if options.out is None else options.out.open("w") as table:
        print("| package | defect | caught by | seconds |\n|---|---|---|---|", file=table, flush=True)
        caught = 0
        for defect in chosen:
            began = time.monotonic()
            try:
                found = caught_by(defect, options.marker, options.workers, narrow=options.narrow)
                seen = f"`{found}`".replace("|", "\\|") if found else "**missed**"
                caught += bool(found)
            except NotRunError as error:
                seen = f"**not run**: {error}"
            what = f"{defect.name} ({defect.effect.rstrip('.')})"
            row = f"| {defect.package} | {what} | {seen} | {time.monotonic() - began:.0f} |"
            print(row, file=table, flush=True)
        print(f"\n{caught} of {len(chosen)} caught", file=table, flush=True)
    return 0


def check(defects: Sequence[Defect]) -> None:
    """See that each defect can be planted, and that the file compiles with it."""
    for defect in defects:
        text = (ROOT / PACKAGE / defect.file).read_text(encoding="utf-8")
        compile(defect.changed(text), defect.file, "exec")
        print(f"fits: {defect.name}")


def control() -> None:
    """See that a copy's package is imported, and not the checkout's."""
    with copied() as copy:
        command = [sys.executable, "-c", "import opforge; print(opforge.__file__)"]
        done = subprocess.run(command, cwd=copy, env=environment(copy), capture_output=True, text=True, check=True)
        if not Path(done.stdout.strip()).is_relative_to(copy):
            raise SystemExit(f"{done.stdout.strip()} is imported, and not the package in {copy}: nothing can be told")


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    """Lend a copy of the checkout, without what git ignores."""
    command = ["git", "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="opforge-defect-", ignore_cleanup_errors=True) as folder:
        copy = Path(folder).resolve()
        for name in filter(None, listed.split("\0")):
            if os.path.lexists(ROOT / name):  # git lists files too that were deleted and not committed
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
        yield copy


def environment(copy: Path) -> dict[str, str]:
    """Return the environment in which a copy's package is imported, with the checkout's cache."""
    paths = [str(copy / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    cache = {"OPFORGE_CACHE": str(ROOT / ".cache" / "opforge")}
    return {**cache, **os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def caught_by(defect: Defect, marker: str, workers: int, *, narrow: bool) -> str:
    """Return the first test that fails with a defect in place; nothing where all pass."""
    with copied() as copy:
        file = copy / PACKAGE / defect.file
        file.write_text(defect.changed(file.read_text(encoding="utf-8")), encoding="utf-8")
        for name in (*defect.tests, *([] if narrow else [""])):
            if found := first_failure(copy, [f"tests/{name}"], marker, workers):
                return found
        return ""


def first_failure(copy: Path, tests: Sequence[str], marker: str, workers: int) -> str:
    """Run tests in a copy, and return the first that fails; nothing where all pass."""
    words = ["-x", "-q", "-n", str(workers), "-m", marker, "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *words, *tests]
    done = subprocess.run(command, cwd=copy, env=environment(copy), capture_output=True, text=True, check=False)
    if done.returncode in (0, _NO_TESTS):
        return ""
    found = _FAILURE.search(done.stdout.rpartition("short test summary info")[2])
    if found is None:
        print((done.stdout + done.stderr)[-4000:], file=sys.stderr)
        raise NotRunError(f"pytest ended with {done.returncode} and named no test")
    return found[1]


if __name__ == "__main__":
    sys.exit(main())
