"""The names that users of kernel benchmarks know, each a line onto opforge."""

import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("opforge") is None:  # a plain checkout works as it stands, installed or not
    sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))
