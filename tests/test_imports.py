"""Python files run as modules."""

from __future__ import annotations

import sys

import pytest

from opforge.imports import run_file


def test_a_file_becomes_a_module_by_the_given_name(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "given_name", raising=False)
    (tmp_path / "any-name.py").write_text("import sys\nitself = sys.modules[__name__]\n")
    module = run_file(tmp_path / "any-name.py", "given_name")
    assert module.itself is module is sys.modules["given_name"]
    (tmp_path / "any-name.py").write_text("raise ValueError(__name__)\n")
    with pytest.raises(ValueError, match="given_name"):
        run_file(tmp_path / "any-name.py", "given_name")


def test_a_file_that_is_not_python_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ImportError, match="is not a Python file"):
        run_file(tmp_path / "notes.txt", "notes")
