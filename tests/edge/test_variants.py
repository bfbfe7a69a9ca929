"""Out variants in eager PyTorch: they write into the tensors that they are given, whatever shape those have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from opforge.edge.define import define
from opforge.edge.out_variants import LIBRARIES, register_out
from opforge.errors import OpforgeError

OPS = torch.ops.variants_test


@pytest.fixture(scope="module", autouse=True)
def _operators() -> Iterator[None]:
    """Register operators without an out variant, and two with theirs; all are gone at the end."""
    before = len(LIBRARIES)
    library = torch.library.Library("variants_test", "FRAGMENT")
    library.define("triple(Tensor x) -> Tensor")
    library.impl("triple", lambda x: x * 3, "CompositeExplicitAutograd")
    library.define("ends(Tensor x, int dim) -> (Tensor, Tensor)")
    library.impl("ends", lambda x, dim: (x.amin(dim), x.amax(dim)), "CompositeExplicitAutograd")
    define("variants_test::halve(Tensor x) -> Tensor", lambda x: x / 2)
    define("variants_test::parts(Tensor x) -> (Tensor, Tensor)", lambda x: (x.floor(), x - x.floor()))
    names = register_out("variants_test::triple", "variants_test::ends", "variants_test::halve")
    assert names == ["variants_test::triple.out", "variants_test::ends.out"]
    yield
    for one in (library, *LIBRARIES[before:]):
        one._destroy()
    del LIBRARIES[before:]


X = torch.tensor([[1.0, 2.5], [4.0, -3.0]])


@pytest.mark.parametrize("shape", [(2, 2), (0,), (5, 3)])
@pytest.mark.parametrize(("name", "result"), [("triple", X * 3), ("halve", X / 2)])
def test_the_result_is_written_and_returned(name, result, shape):
    out = torch.zeros(shape)
    assert getattr(OPS, name).out(X, out=out) is out
    assert torch.equal(out, result)


def test_each_of_two_results_has_its_tensor():
    low, high = torch.zeros(2), torch.zeros(2)
    assert [id(one) for one in OPS.ends.out(X, 1, out0=low, out1=high)] == [id(low), id(high)]
    assert (low.tolist(), high.tolist()) == ([1.0, -3.0], [2.5, 4.0])
    whole, rest = torch.zeros(0), torch.zeros(0)
    OPS.parts.out(X, out0=whole, out1=rest)
    assert (whole.tolist(), rest.tolist()) == ([[1.0, 2.0], [4.0, -3.0]], [[0.0, 0.5], [0.0, 0.0]])


def test_tensors_without_contents_come_back():
    x, low, high = (torch.empty(shape, device="meta") for shape in ((3, 4), 3, 3))
    assert OPS.triple.out(x, out=x) is x
    assert [id(one) for one in OPS.ends.out(x, 1, out0=low, out1=high)] == [id(low), id(high)]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("triple", "'triple' is not the full name of an operator; write namespace::name"),
        ("variants_test::triple.out", "is not the full name of an operator"),
        ("variants_test::tripel", "there is no operator variants_test::tripel; import the package that registers it"),
    ],
)
def test_a_name_that_is_none_is_answered(name, said):
    with pytest.raises(OpforgeError, match=said):
        register_out(name)


def test_an_operator_is_not_registered_twice():
    with pytest.raises(OpforgeError, match=r"variants_test::halve cannot be registered: .* is it registered twice"):
        define("variants_test::halve(Tensor x) -> Tensor", lambda x: x / 2)
