from __future__ import annotations

import pytest

from opforge.backends import BackendOptions
from opforge.backends.directory import DirectoryBackend, operator_of_folder
from opforge.errors import NothingToJudgeError, OpforgeError, UnknownNameError
from opforge.ops import table


def kernels(root, **options):
    return DirectoryBackend(BackendOptions(root, **options)).kernels([op.name for op in table()])


def write(root, folder, *names):
    (root / folder).mkdir(parents=True)
    for name in names:
        (root / folder / name).write_text("")


def test_the_newest_implementation_by_natural_order_wins(tmp_path):
    write(tmp_path, "relu", *[f"relu_implementation_{n}.py" for n in (1, 2, 10)], "helper.py")
    assert [k.name for k in kernels(tmp_path)] == ["relu_implementation_10"]


def test_another_implementation_can_be_named(tmp_path):
    write(tmp_path, "relu", "relu_implementation_1.py", "relu_implementation_2.py")
    for name in ("1", "relu_implementation_1"):
        assert [k.name for k in kernels(tmp_path, implementations={"relu": name})] == ["relu_implementation_1"]
    with pytest.raises(UnknownNameError, match="implementation of relu"):
        kernels(tmp_path, implementations={"relu": "3"})
    with pytest.raises(UnknownNameError, match="kernel folder"):
        kernels(tmp_path, implementations={"rel": "1"})


def test_folders_named_after_an_overload_win_over_the_packets(tmp_path):
    write(tmp_path, "sub", "sub_implementation_1.py")
    write(tmp_path, "sub__Scalar", "sub__Scalar_implementation_1.py")
    serving = {s.op: k.name for k in kernels(tmp_path) for s in k.serves}
    assert serving["sub.Tensor"] == "sub_implementation_1"
    assert serving["sub_.Tensor"] == "sub_implementation_1"
    assert serving["sub.Scalar"] == "sub__Scalar_implementation_1"


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("add__Scalar", "add.Scalar"),
        ("__and__", "__and__"),
        ("add.Scalar", "add.Scalar"),
        ("_softmax", "_softmax"),
        ("add_", "add_"),
    ],
)
def test_names_of_folders(folder, name):
    assert operator_of_folder(folder) == name


def test_an_inplace_folder_serves_itself_alone_and_wins_over_the_functional_one(tmp_path):
    write(tmp_path, "relu", "relu_implementation_1.py")
    write(tmp_path, "relu_", "relu__implementation_1.py")
    serving = {s.op: k.name for k in kernels(tmp_path) for s in k.serves}
    assert serving == {
        "relu.default": "relu_implementation_1",
        "relu.out": "relu_implementation_1",
        "relu_.default": "relu__implementation_1",
    }


def test_digests_follow_the_source(tmp_path):
    write(tmp_path, "relu", "relu_implementation_1.py")
    (before,) = kernels(tmp_path)
    (tmp_path / "relu" / "relu_implementation_1.py").write_text("x = 1")
    (after,) = kernels(tmp_path)
    assert before.digest != after.digest


def test_nothing_there(tmp_path):
    with pytest.raises(NothingToJudgeError):
        kernels(tmp_path)
    with pytest.raises(OpforgeError, match="no kernel directory"):
        kernels(tmp_path / "nowhere")


def test_sources_in_cpp_and_cuda_are_kernels_too(tmp_path):
    write(
        tmp_path, "relu", "relu_implementation_1.py", "relu_implementation_1.cpp", "relu_implementation_2.cu", "relu.h"
    )
    chosen = {name: kernels(tmp_path, implementations={"relu": name})[0].file for name in ("1", "1.cpp", "2")}
    assert {name: file.rpartition("/")[2] for name, file in chosen.items()} == {
        "1": "relu_implementation_1.py",
        "1.cpp": "relu_implementation_1.cpp",
        "2": "relu_implementation_2.cu",
    }
    (newest,) = kernels(tmp_path)
    assert newest.file.endswith("_2.cu")
    (tmp_path / "relu" / "relu.h").write_text("#define X")
    assert kernels(tmp_path)[0].digest != newest.digest
