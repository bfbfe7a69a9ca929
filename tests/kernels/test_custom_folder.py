"""Custom operators are found by the names of their files, and their reference in the order that the docs say."""

from __future__ import annotations

import pytest

from opforge.errors import NothingToJudgeError, OpforgeError, UnknownNameError
from opforge.kernels.custom_folder import find_custom_ops

IMPL = "def twice_kernel_impl(x):\n    return 2 * x\n"


def test_every_implementation_is_a_kernel_of_its_own(custom_root):
    files = dict.fromkeys(["twice_py.py", "twice_triton.py", "twice_fast.cpp", "twice_gpu.cu"], IMPL)
    others = {"gen_input.py": "", "twice_reference.py": "", "helper.py": "", "twice.py": "", "other_twice.py": ""}
    folder = find_custom_ops(custom_root({"twice": {**files, **others}})).folders["twice"]
    assert [k.name for k in folder.kernels] == ["twice__fast", "twice__gpu", "twice__py", "twice__triton"]
    assert {k.primary for k in folder.kernels} == {"twice"}
    assert {k.entries for k in folder.kernels} == {("twice_kernel_impl",)}
    assert [k.file.rpartition("/")[2] for k in folder.kernels][:2] == ["twice_fast.cpp", "twice_gpu.cu"]


def test_two_files_that_differ_in_their_suffix_alone_have_names_that_differ(custom_root):
    folder = find_custom_ops(
        custom_root({"twice": {"twice_a.py": IMPL, "twice_a.cpp": "", "twice_b.py": IMPL}})
    ).folders["twice"]
    assert [k.name for k in folder.kernels] == ["twice__a.cpp", "twice__a.py", "twice__b"]


def test_the_reference_comes_first(custom_root):
    reference = "def twice_reference(x):\n    return 2 * x\n"
    folder = find_custom_ops(custom_root({"twice": {"twice_py.py": IMPL, "twice_reference.py": reference}})).folders[
        "twice"
    ]
    assert folder.reference.name == "twice_reference"
    assert folder.reference.entries == ("twice_reference",)
    assert folder.warnings == []


@pytest.mark.parametrize(
    ("files", "name", "warning"),
    [
        ({"twice_py.py": IMPL}, "twice__py", "twice has no reference: twice__py is used instead"),
        ({"twice_a.py": "x = 1\n", "twice_b.py": IMPL}, "twice__b", "twice__b is used instead"),
        ({"twice_a.py": "def twice(:\n", "twice_b.py": IMPL}, "twice__b", "twice__b is used instead"),
        ({"twice_a.cpp": "", "twice_b.py": IMPL}, "twice__b", "twice__b is used instead"),
        ({"twice_a.py": "if True:\n    twice_kernel_impl = abs\n"}, "twice__a", "twice__a is used instead"),
        ({"twice_a.py": "x = 1\n"}, "the identity", "the identity is its reference"),
        ({"gen_input.py": ""}, "the identity", "the identity is its reference"),
        (
            {"twice_py.py": IMPL, "twice_reference.py": "def reference(x):\n    return x\n"},
            "twice__py",
            "twice_reference.py does not define twice_reference, and is ignored",
        ),
    ],
)
def test_what_stands_in_for_a_reference_is_said(custom_root, files, name, warning):
    folder = find_custom_ops(custom_root({"twice": files})).folders["twice"]
    assert folder.reference.name == name
    assert any(warning in said for said in folder.warnings)


def test_a_reference_that_cannot_be_parsed_is_not_passed_over(custom_root):
    files = {"twice_py.py": IMPL, "twice_reference.py": "def twice_reference(:\n"}
    assert find_custom_ops(custom_root({"twice": files})).folders["twice"].reference.name == "twice_reference"


def test_what_is_no_operator_is_named(custom_root):
    root = custom_root({"twice": {"twice_py.py": IMPL}, "my-op": {"gen_input.py": ""}, "notes": {"notes.txt": ""}})
    found = find_custom_ops(root)
    assert list(found.folders) == ["twice"]
    assert any("my-op cannot be the name" in s for s in found.skipped)
    assert any("notes holds neither gen_input.py nor notes_NAME.py" in s for s in found.skipped)


def test_an_unknown_name_is_answered_with_its_neighbour(custom_root):
    with pytest.raises(UnknownNameError, match="did you mean 'twice'"):
        find_custom_ops(custom_root({"twice": {"twice_py.py": IMPL}})).select(["twise"])


def test_a_root_that_is_missing_or_empty(tmp_path):
    with pytest.raises(
        OpforgeError, match=r"there is no folder .* of custom operators; name it with --custom-ops-root"
    ):
        find_custom_ops(tmp_path / "nowhere")
    with pytest.raises(NothingToJudgeError, match="no custom operator in"):
        find_custom_ops(tmp_path)
