"""``python -m BackendBench.scripts.setup_operator_directories``: a folder with a template for each operator."""

import argparse
import sys
from pathlib import Path

from BackendBench.scripts import exit_on_error
from BackendBench.utils import op_name_to_folder_name
from opforge.backends.directory import implementation_files
from opforge.backends.scaffold import render
from opforge.ops import SchemaKind, table
from opforge.suites.base import SuiteOptions
from opforge.suites.lookup import find_suite

SUITES = ("torchbench", "opinfo", "all")


def setup_operator_directories(
    base_dir: str | Path = "generated_kernels", verbose: bool = False, suite: str = "torchbench"
) -> None:
    """Make a folder such as ``add__Tensor`` for each functional operator of a suite; kernels there are kept."""
    root, made, kept = Path(base_dir), 0, 0
    for name in _operators(suite):
        folder = root / op_name_to_folder_name(name)
        if implementation_files(folder):
            kept += 1
            continue
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{folder.name}_implementation_1.py"
        file.write_text(render(name, root, []), encoding="utf-8")
        made += 1
        if verbose:
            sys.stdout.write(f"made {file}\n")
    sys.stdout.write(f"{made} kernels to fill in under {root}, {kept} left as they were\n")


def _operators(suite: str) -> list[str]:
    functional = [op.name for op in table() if op.kind is SchemaKind.FUNCTIONAL and not op.base.startswith("_foreach")]
    if suite == "all":
        return functional
    cases = find_suite(suite).load(SuiteOptions(dtypes=("f32",))).cases
    return [name for name in functional if name in cases]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-dir", default="generated_kernels", help="folder of the operators' folders")
    parser.add_argument("--verbose", "-v", action="store_true", help="name each new file")
    parser.add_argument("--suite", choices=SUITES, default="torchbench", help="the operators of which suite")
    options = parser.parse_args()
    setup_operator_directories(options.base_dir, options.verbose, options.suite)


if __name__ == "__main__":
    exit_on_error(main)
