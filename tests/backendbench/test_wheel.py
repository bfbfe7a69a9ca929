"""The layer is a wheel of its own, so that opforge's does not overwrite an installed BackendBench."""

from __future__ import annotations

import shutil
import zipfile

from tests.conftest import ROOT
from tests.package.packages import wheel


def test_the_wheel_of_the_layer_has_all_of_it(tmp_path):
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    shutil.copytree(ROOT / "BackendBench", tmp_path / "layer", ignore=ignored)
    packed = set(zipfile.ZipFile(wheel(tmp_path / "layer", tmp_path)).namelist())
    modules = {f"BackendBench/{p.relative_to(ROOT / 'BackendBench')}" for p in (ROOT / "BackendBench").rglob("*.py")}
    assert modules <= packed
    assert {name for name in packed if name.endswith(".py")} == modules
