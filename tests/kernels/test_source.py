"""The digest of a kernel's source has in it what the kernel is made of, and nothing else."""

from __future__ import annotations

import hashlib
import os

import pytest

from opforge.kernels.source import UNREADABLE, dependencies, digest, why_unusable
from opforge.runtime import untrusted_files


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
        ("import relu_implementation_0", "relu_implementation_0.py"),
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


def make_fifo(path):
    os.mkfifo(path)


def make_endless(path):
    path.touch()
    os.truncate(path, 8 << 40)


def make_link(path):
    path.symlink_to("/etc/passwd")


@pytest.mark.parametrize(
    ("make", "words"),
    [(make_fifo, "not a regular file"), (make_endless, "8796093022208 bytes"), (make_link, "links are not followed")],
)
def test_a_source_that_is_no_plain_file_is_not_read(tmp_path, make, words):
    kernel = tmp_path / "relu_implementation_1.py"
    make(kernel)
    assert digest(kernel) == UNREADABLE
    assert words in why_unusable(kernel)


@pytest.mark.parametrize("make", [make_fifo, make_endless, make_link])
def test_what_lies_beside_and_is_not_named_is_not_read(tmp_path, make):
    kernel = tmp_path / "relu_implementation_1.py"
    kernel.write_text("open('other')")
    (tmp_path / "other").write_text("0")
    make(tmp_path / "unnamed")
    assert digest(kernel) != UNREADABLE


def test_of_a_folder_that_holds_much_what_is_named_is_found(tmp_path):
    kernel = tmp_path / "relu_implementation_1.py"
    kernel.write_text("import helper")
    (tmp_path / "helper.py").write_text("import deeper")
    (tmp_path / "deeper.py").write_text("open('named.bin')")
    (tmp_path / "named.bin").write_text("0")
    for number in range(untrusted_files.MAX_FILES):
        (tmp_path / f"{number}.txt").touch()
    assert dependencies(kernel) == {tmp_path / name for name in ("helper.py", "deeper.py", "named.bin")}
    assert digest(kernel) != UNREADABLE


def test_a_link_to_a_large_tree_is_not_followed(tmp_path):
    kernel = tmp_path / "relu_implementation_1.py"
    kernel.write_text("open('data/bin/python3')")
    (tmp_path / "data").symlink_to("/usr")
    assert dependencies(kernel) == set()


@pytest.mark.parametrize("text", ["-" * 60_000 + "1", "(" * 5_000, "a" + ".b" * 50_000])
def test_a_source_that_is_too_deep_to_be_parsed_has_a_digest(tmp_path, text):
    kernel = tmp_path / "relu_implementation_1.py"
    kernel.write_text(f"x = {text}\n")
    assert digest(kernel) != UNREADABLE


def test_the_end_of_a_source_does_not_stand_for_another_file(tmp_path):
    """The judged source has no other file; the shipped one has one, whose name and digest ended the judged one."""
    text = b'#if __has_include("other.h")\n#include "other.h"\n#endif\n//'
    other = b"// something else"
    judged, shipped = tmp_path / "judged" / "relu.cpp", tmp_path / "shipped" / "relu.cpp"
    for file in (judged, shipped):
        file.parent.mkdir()
    judged.write_bytes(text + b"other.h\0" + hashlib.sha256(other).digest())
    shipped.write_bytes(text)
    shipped.with_name("other.h").write_bytes(other)
    assert dependencies(shipped)
    assert not dependencies(judged)
    assert digest(judged) != digest(shipped)


def test_it_is_too_long_for_two_sources_to_have_the_same(tmp_path):
    (tmp_path / "relu.py").write_text("")
    assert len(digest(tmp_path / "relu.py")) * 4 >= 256
