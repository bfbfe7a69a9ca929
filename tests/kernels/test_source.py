"""The digest of a kernel's source has in it what the kernel is made of, and nothing else."""

from __future__ import annotations

import pytest

from opforge.kernels.source import digest


@pytest.mark.parametrize(
    ("source", "file"),
    [
        ("import helper", "helper.py"),
        ("def f():\n    from helper import x", "helper.py"),
        ("import importlib\nimportlib.import_module('helper')", "helper.py"),
        ("__import__('tools.helper')", "tools/helper.py"),
        ("from tools import helper", "tools/helper.py"),
        ("from pathlib import Path\nPath(__file__).with_name('low.json')", "low.json"),
        ("open('tables/low.bin')", "tables/low.bin"),
        ("folder / 'tables'", "tables/inner/low.bin"),
        ("import fast", "fast.cpython-311-x86_64-linux-gnu.so"),
    ],
)
def test_what_is_imported_or_named_is_part_of_it(tmp_path, source, file):
    kernel = tmp_path / "relu_implementation_1.py"
    kernel.write_text(source)
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x = 0")
    before = digest(kernel)
    path.write_text("x = 3")
    assert digest(kernel) != before


@pytest.mark.parametrize(
    ("source", "file"),
    [
        ("'helper'", "other.py"),
        ("open('../low.json')", "../low.json"),
        ("open('.low.json')", ".low.json"),
        ("'relu_implementation_1'", "relu_implementation_1.proof.json"),
    ],
)
def test_other_files_are_not(tmp_path, source, file):
    folder = tmp_path / "relu"
    folder.mkdir()
    kernel = folder / "relu_implementation_1.py"
    kernel.write_text(source)
    (folder / file).write_text("0")
    before = digest(kernel)
    (folder / file).write_text("3")
    assert digest(kernel) == before
