"""What model a word means, without running any of its code."""

from __future__ import annotations

import pytest

from opforge.errors import OpforgeError
from opforge.models.target import ModelTarget, find_model
from opforge.traces.targets import Settings


def test_files_and_functions_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise SystemExit\n")
    (tmp_path / "package" / "inner").mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").write_text("raise SystemExit\n")
    (tmp_path / "package" / "inner" / "__init__.py").touch()
    of_file = find_model("mine.py")
    assert of_file.file == of_file.reads == str(tmp_path / "mine.py")
    function = find_model("mine:make")
    assert (function.module, function.function, function.folder) == ("mine", "make", str(tmp_path))
    assert function.reads == str(tmp_path / "mine.py")
    inner = find_model("package.inner:make")
    assert (inner.folder, inner.reads) == (str(tmp_path), str(tmp_path / "package"))
    assert ModelTarget.from_wire(inner.wire()) == inner


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("nothing.py", "there is no file 'nothing.py'; give a Python file that defines"),
        ("resnet18", "unknown model 'resnet18'; give a Python file"),
        ("mine:", "'mine:' is not module:function"),
        ("a b:c", "'a b:c' is not module:function"),
        ("nowhere:make", "there is no module 'nowhere', neither in this folder nor where Python looks"),
        ("package.nowhere:make", "there is no module 'package.nowhere'"),
    ],
)
def test_words_that_mean_no_model(tmp_path, monkeypatch, word, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    with pytest.raises(OpforgeError, match=said):
        find_model(word)


def test_architectures_are_found_by_their_library(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(
        OpforgeError, match=r"hf:BertModel needs the package transformers; install it with `pip install"
    ):
        find_model("hf:BertModel")
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("raise SystemExit\n")
    found = find_model("hf:BertModel", Settings(batch=3, changes={"hidden_size": 8}))
    assert (found.library, found.architecture, found.folder) == ("hf", "BertModel", str(tmp_path))
    assert found.settings["batch"] == 3
    assert ModelTarget.from_wire(found.wire()) == found
    with pytest.raises(OpforgeError, match="--seq 0 is out of range"):
        find_model("hf:BertModel", Settings(seq=0))
