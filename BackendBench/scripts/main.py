"""``python -m BackendBench.scripts.main …`` and ``python BackendBench/scripts/main.py …`` are `opforge run …`."""

import sys
from pathlib import Path

if not __package__:  # run as a file: its own folder is on the path, the checkout is not
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import BackendBench  # noqa: F401  # finds opforge in a checkout
from opforge.cli.main import main

if __name__ == "__main__":
    main(["run", *sys.argv[1:]])
