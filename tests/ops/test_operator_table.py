from __future__ import annotations

import subprocess
import sys

import pytest

from opforge.errors import UnknownNameError
from opforge.ops import SchemaKind, table
from opforge.runtime.loading import aten_operators
from opforge.runtime.operator_names import select_operators


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("relu", "relu.default"),
        ("add", "add.Tensor"),
        ("mul", "mul.Tensor"),
        ("div", "div.Tensor"),
        ("add.Tensor", "add.Tensor"),
        ("aten::add.out", "add.out"),
        ("aten.add.Scalar", "add.Scalar"),
        ("torch.ops.aten.mm.default", "mm.default"),
        ("softmax", "softmax.int"),
    ],
)
def test_names_that_people_type_resolve(name, expected):
    assert table().resolve(name).name == expected


def test_family_is_functional_inplace_and_out():
    family = table().family(table().resolve("add"))
    assert {(op.name, op.kind) for op in family} == {
        ("add.Tensor", SchemaKind.FUNCTIONAL),
        ("add_.Tensor", SchemaKind.INPLACE),
        ("add.out", SchemaKind.OUT),
    }


def test_a_kernel_serves_its_family_and_may_serve_the_packets_other_overloads():
    own, others = table().served_by("sub")
    assert {op.name for op in own} == {"sub.Tensor", "sub_.Tensor", "sub.out"}
    assert {op.name for op in others} == {"sub.Scalar", "sub_.Scalar", "sub.Scalar_out"}
    assert "where.self" in {op.name for op in table().served_by("where")[1]}


@pytest.mark.parametrize(
    ("op", "folder"),
    [("relu_", "relu"), ("add.out", "add"), ("__iand__.Tensor", "__iand__"), ("_foreach_add_.List", "_foreach_add")],
)
def test_all_forms_of_an_operator_have_one_folder(op, folder):
    assert table().folder_of(table().resolve(op)) == folder


def test_a_folder_named_after_an_overload_serves_that_family_alone():
    own, others = table().served_by("sub.Scalar")
    assert "sub.Scalar" in {op.name for op in own}
    assert others == []


def test_schema_facts():
    assert table().resolve("linear").composite
    assert not table().resolve("mm").composite
    assert not table().resolve("silu_backward").composite  # it has kernels of its own besides
    assert table().resolve("bernoulli.p").is_random
    assert not table().resolve("relu").is_random
    inplace = table().resolve("relu_")
    assert inplace.mutates
    assert inplace.arguments[0].writes
    assert inplace.packet == "relu"
    view = table().resolve("t")
    assert view.returns[0].alias == "a"
    assert not view.mutates
    out = table().resolve("add.out")
    assert out.input_names == ("self", "other", "alpha")


def test_select_takes_whole_packets_or_single_overloads():
    names = {op.name for op in table().select(["relu", "add.Tensor"])}
    assert names == {"relu.default", "relu_.default", "relu.out", "add.Tensor"}


def test_a_bare_name_means_the_same_to_a_package_which_knows_the_dispatcher_alone():
    bases = ["add", "relu_", "__iand__", "_foreach_add", *sorted({op.base for op in table()})[::50]]
    known, operators = {op.name for op in table()}, aten_operators()
    for base in bases:
        assert known & set(select_operators([base], operators)) == {op.name for op in table().select([base])}, base
    with pytest.raises(ValueError, match="unknown operator 'rellu'; did you mean 'relu'"):
        select_operators(["rellu"], operators)


@pytest.mark.parametrize(("name", "hint"), [("rellu", "'relu'"), ("add.Tensr", "'add.Tensor'")])
def test_an_unknown_name_is_answered_with_its_neighbours(name, hint):
    with pytest.raises(UnknownNameError, match=hint):
        table().resolve(name)


def test_every_overload_of_the_dispatcher_with_a_yaml_entry_is_known():
    import torch

    known = {op.name for op in table()}
    registered = {
        f"{n.removeprefix('aten::').partition('.')[0]}.{n.partition('.')[2] or 'default'}"
        for n in torch._C._dispatch_get_all_op_names()
        if n.startswith("aten::")
    }
    assert len(registered & known) / len(registered) > 0.99


def test_the_table_needs_no_torch():
    code = "import sys; from opforge.ops import table; table().resolve('relu'); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_devices_that_an_operator_has_a_kernel_for():
    assert table().resolve("add.Tensor").devices == {"cpu", "cuda"}
    assert table().resolve("layer_norm").devices == {"cpu", "cuda"}
    assert table().resolve("cudnn_batch_norm").devices == {"cuda"}
    assert table().resolve("_scaled_dot_product_flash_attention_for_cpu").devices == {"cpu"}
