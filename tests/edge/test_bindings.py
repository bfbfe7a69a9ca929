"""The YAML file, selections, schemas and words of the command line: what cannot work is refused with a reason, before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from opforge.edge.bindings import BindingError, read_bindings, select_all, select_names
from opforge.edge.export import parse_dynamic, parse_target
from opforge.edge.init import make_folder
from opforge.edge.out_variants import out_variant
from opforge.edge.program import check_program
from opforge.errors import OpforgeError, UnknownNameError

MUL3 = "my_ops::mul3.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)"


def entry(func: str = MUL3, meta: str = "null", kernel: str = "my_ops::mul3_out") -> str:
    return f"- func: {func}\n  kernels:\n    - arg_meta: {meta}\n      kernel_name: {kernel}\n"


def special(*metas: str, types: str = "[Float, Int]", order: str = "[0, 1]") -> str:
    """Return an entry with a kernel for each arg_meta."""
    kernels = "".join(f"    - arg_meta: {meta}\n      kernel_name: my_ops::mul3_{n}\n" for n, meta in enumerate(metas))
    return f"- func: {MUL3}\n  type_alias:\n    T0: {types}\n  dim_order_alias:\n    D0: {order}\n  kernels:\n{kernels}"


def written(folder: Path, text: str) -> Path:
    path = folder / "ops.yaml"
    path.write_text(text)
    return path


def test_an_entry_names_operator_and_function(tmp_path):
    (found,) = read_bindings(written(tmp_path, entry()))
    assert (found.name, found.namespace) == ("my_ops::mul3.out", "my_ops")
    assert found.kernels[0].cpp_function == "my_ops::native::mul3_out"
    assert found.schema == MUL3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("", "holds no operators", id="empty"),
        pytest.param("- [", "is not YAML", id="no-yaml"),
        pytest.param("- kernels: []\n", "has no func", id="no-func"),
        pytest.param(entry(meta="{T: [Float]}"), "names the tensors of the schema in order", id="arg_meta"),
        pytest.param(entry(meta="{x: Float, out: Float}"), "the names of a type_alias", id="no-alias"),
        pytest.param(entry(meta="{x: [T0, D0], out: [T0, D0]}"), "does not define 'T0'", id="unknown-alias"),
        pytest.param(special("{x: [T0, D0], out: [T0, D0]}", types="[Half]"), "allowed: a list of dtypes", id="dtype"),
        pytest.param(special("{x: [T0, D0], out: [T0, D0]}", order="[0, 2]"), "a list of dimensions", id="order"),
        pytest.param(special(*["{x: [T0, D0], out: [T0, D0]}"] * 2), "serve the same", id="same-twice"),
        pytest.param(special("null", "null"), "serve the same: arg_meta null", id="two-defaults"),
        pytest.param(entry(kernel="mul3_out"), "it is namespace::function", id="kernel-without-namespace"),
        pytest.param(entry(kernel="my_ops::native::mul3_out"), "write my_ops::mul3_out", id="native-twice"),
        pytest.param(entry() + entry(kernel="my_ops::other"), "binds my_ops::mul3.out twice", id="twice"),
        pytest.param(
            entry() + entry(MUL3.replace("my_ops", "others")), "tells operators apart by name", id="two-namespaces"
        ),
        pytest.param(entry(MUL3.replace("my_ops", "aten")), "ExecuTorch registers itself", id="aten"),
        pytest.param(entry(MUL3.replace("my_ops::", "")), "not an operator with its namespace", id="no-namespace"),
        pytest.param(entry("my_ops::mul3(Tensor x) -> Tensor"), "the runtime calls the out variant", id="functional"),
        pytest.param(entry("my_ops::mul3.out(Tensr x) -> Tensor"), "is not a schema", id="no-schema"),
        pytest.param(f"- func: {MUL3}\n", "must have kernels, each with", id="no-kernels"),
        pytest.param(entry() + "  tags: core\n", "the field 'tags'", id="unknown-field"),
    ],
)
def test_a_binding_that_cannot_work_is_refused(tmp_path, text, said):
    with pytest.raises(BindingError, match=said):
        read_bindings(written(tmp_path, text))


def test_a_list_with_spaces_is_refused_with_the_way_to_write_it(tmp_path):
    text = entry("my_ops::s.out(Tensor x, int[] dims=[0, 1], *, Tensor(a!) out) -> Tensor(a!)")
    with pytest.raises(BindingError, match="lists without spaces"):
        read_bindings(written(tmp_path, text))


def test_a_missing_file_says_what_makes_one(tmp_path):
    with pytest.raises(OpforgeError, match="opforge edge init"):
        read_bindings(tmp_path / "ops.yaml")


@pytest.mark.parametrize("word", ["mul3", "mul3.out", "my_ops::mul3", "my_ops::mul3.out"])
def test_an_operator_is_selected_by_any_of_its_names(tmp_path, word):
    other = MUL3.replace("mul3", "add3")
    entries = read_bindings(written(tmp_path, entry() + entry(other, kernel="my_ops::add3_out")))
    assert select_names(entries, [word]).names == ("my_ops::mul3.out",)
    assert select_all(entries).names == ("my_ops::mul3.out", "my_ops::add3.out")


def test_a_misspelt_selection_is_refused_with_what_was_meant(tmp_path):
    entries = read_bindings(written(tmp_path, entry()))
    with pytest.raises(UnknownNameError, match=r"did you mean 'my_ops::mul3.out'"):
        select_names(entries, ["my_ops::mull3.out"])


@pytest.mark.parametrize(
    ("functional", "out"),
    [
        ("n::f(Tensor x) -> Tensor", "f.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)"),
        (
            "n::f(Tensor[] xs, int[] dims=[0,1], *, Scalar s=1, Tensor? y=None) -> (Tensor, Tensor)",
            "f.out(Tensor[] xs, int[] dims=[0,1], *, Scalar s=1, Tensor? y=None, Tensor(a!) out0, Tensor(b!) out1) -> (Tensor(a!), Tensor(b!))",
        ),
    ],
)
def test_the_out_variant_has_the_same_arguments_and_one_for_each_result(functional, out):
    assert out_variant(functional).out_schema == out


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("f(Tensor x) -> Tensor", "has no namespace"),
        ("n::f.a(Tensor x) -> Tensor", "the overload .out is added"),
        ("n::f(Tensor(a!) x) -> Tensor", "writes to an argument"),
        ("n::f(Tensor x) -> int", "returns int"),
        ("n::f(Tensor x) -> ()", "returns nothing"),
    ],
)
def test_a_schema_without_an_out_variant_is_refused(schema, said):
    with pytest.raises(OpforgeError, match=said):
        out_variant(schema)


def test_dimensions_that_vary_are_read():
    assert parse_dynamic(["x.0=1..64", "x.1=2..8", "1.0=3..9"]) == {"x": {0: (1, 64), 1: (2, 8)}, "1": {0: (3, 9)}}


@pytest.mark.parametrize("word", ["x", "x.0", "x.a=1..2", "x.0=5..2", "x.0=0..4", "x.0=4..4"])
def test_a_dimension_that_means_nothing_is_refused(word):
    with pytest.raises(OpforgeError, match="--dynamic"):
        parse_dynamic([word])


def test_a_model_is_found_by_file_and_name(tmp_path):
    file = tmp_path / "net.py"
    file.write_text("")
    assert parse_target(str(file)).function == "model"
    assert parse_target(f"{file}:Net").function == "Net"
    for wrong in (str(tmp_path / "none.py"), f"{tmp_path}/none.py:Net", f"{file}:1", "no_such_module:f"):
        with pytest.raises(OpforgeError, match="model"):
            parse_target(wrong)


def test_an_architecture_is_not_exported(tmp_path, monkeypatch):
    (tmp_path / "timm.py").write_text("")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(OpforgeError, match="'timm:resnet18' is an architecture's name, which cannot be exported; give"):
        parse_target("timm:resnet18")


def test_what_is_no_program_is_refused_before_anything_reads_it(tmp_path):
    file = tmp_path / "model.pte"
    with pytest.raises(OpforgeError, match="cannot be read"):
        check_program(file)
    file.write_bytes(b"not a program")
    with pytest.raises(OpforgeError, match="not a program of ExecuTorch"):
        check_program(file)


@pytest.mark.parametrize(
    ("namespace", "ops", "said"),
    [
        ("aten", ["mul3"], "choose another"),
        ("1st", ["mul3"], "cannot be a namespace"),
        ("my_ops", ["Mul"], "cannot be used"),
        ("my_ops", ["class"], "word of Python"),
        ("my_ops", ["model"], "use themselves"),
        ("my_ops", ["mul3", "mul3"], "named twice"),
        ("my_ops", [], "no operator"),
    ],
)
def test_names_that_a_folder_cannot_have_are_refused(tmp_path, namespace, ops, said):
    with pytest.raises(OpforgeError, match=said):
        make_folder(tmp_path / "new", namespace, ops)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_made_whole_and_never_over_another(tmp_path):
    files = make_folder(tmp_path / "new", "my_ops", ["mul3", "scale"])
    assert [str(file) for file in files] == [
        "README.md", "kernels/mul3.cpp", "kernels/scale.cpp", "model.py", "ops.py", "ops.yaml", "tests/test_ops.py",
    ]  # fmt: skip
    assert [one.name for one in read_bindings(tmp_path / "new" / "ops.yaml")] == [
        "my_ops::mul3.out",
        "my_ops::scale.out",
    ]
    with pytest.raises(OpforgeError, match="there already"):
        make_folder(tmp_path / "new", "my_ops", ["mul3"])
