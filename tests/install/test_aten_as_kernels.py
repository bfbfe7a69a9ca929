"""With kernels that are ATen's own operators a program behaves as without them: whatever differs, or is blamed on them, is our doing."""

from __future__ import annotations

import contextlib
import copy
import sys
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import opforge
from opforge.runtime.adapters import adapt
from opforge.runtime.dispatch import KernelWarning
from opforge.runtime.operator_schema import schema_of
from opforge.runtime.results import ResultCheck
from tests.install.proving import outcome, prove

LAYOUTS = ["contiguous", "transposed", "strided", "expanded", "offset", "empty", "shapes differ"]
ANY = {"rank": [0, 5], "numel": [0, 100_000], "layouts": LAYOUTS, "timed": [[0, 100_000, True]]}
F16, F64 = torch.float16, torch.float64


def aten(op):
    """Return the source of a kernel that calls ATen's own operator."""
    base, _, overload = op.partition(".")
    return f"import torch\ndef {base}_kernel_impl(*a, **k):\n    return torch.ops.aten.{base}.{overload or 'default'}(*a, **k)\n"


def in_turns(root, call, policy="all"):
    """Return how a call ends without kernels, with them, and with them when it is known already; and the counters."""
    without = outcome(call)
    with opforge.enabled(root, device="cpu", policy=policy) as made:
        return [without, outcome(call), outcome(call)], made.counters()


def is_one(ended):
    return ended[1:] == ended[:1] * 2


def moved():
    base = torch.arange(4.0)
    view = base[:2]
    view.as_strided_((2,), (1,), 2).add_(10)
    return base, view


def turned():
    base = torch.arange(6.0).reshape(2, 3)
    return base, base[:].transpose_(0, 1), base.clone().unsqueeze_(0), base.clone().resize_(3)


def set_elsewhere():
    base, other = torch.arange(4.0), torch.tensor([7.0, 8.0])
    base[:2].set_(other).add_(1)
    return base, other


@pytest.mark.parametrize(
    ("call", "ops"),
    [
        (moved, ["as_strided"]),
        (turned, ["transpose.int", "unsqueeze", "resize"]),
        (set_elsewhere, ["set.source_Tensor"]),
    ],
)
def test_forms_that_move_a_tensor_are_left_to_aten(kernels, call, ops):
    root = kernels({op.partition(".")[0]: aten(op) for op in ops})
    ended, _ = in_turns(root, call)
    assert is_one(ended)
    with opforge.enabled(root, device="cpu", policy="all") as made:
        name = f"{ops[0].partition('.')[0]}_"
        assert "changes the geometry of its tensor" in next(
            why for op, why in made.refused.items() if op.startswith(name)
        )


def test_what_parameters_are_made_by_is_left_to_aten(kernels):
    root = kernels({"detach": aten("detach"), "alias": aten("alias"), "relu": aten("relu")})
    with opforge.enabled(root, device="cpu", policy="all") as made:
        layer = copy.deepcopy(nn.Linear(2, 2)).half()
        assert isinstance(nn.Parameter(torch.ones(2)), nn.Parameter)
        assert layer.weight.dtype == F16
        assert set(made.refused) >= {"detach.default", "alias.default"}
        assert "become parameters" in made.refused["detach.default"]


CUMSUM = """
import torch
def cumsum_kernel_impl(self, dim, *, dtype=None):
    n = self.shape[0]
    return torch.ones(n, n).tril() @ self
"""


@pytest.mark.parametrize("policy", ["proven", "all"])
def test_inside_a_kernel_nothing_is_cast(kernels, policy):
    root = kernels({"cumsum": CUMSUM})
    prove(root, "cumsum", {"cumsum.default": {"float32": {**ANY, "arguments": {"dim": {"int": [0, 0]}}}}})
    x = torch.full((300, 1), 1.01)
    with opforge.enabled(root, device="cpu", policy=policy) as made:
        for autocast in (False, True, True, False):
            with torch.autocast("cpu", enabled=autocast):
                result = torch.cumsum(x, 0)
                assert (x @ torch.ones(1, 1)).dtype == (torch.bfloat16 if autocast else torch.float32), "outside of it"
            assert result.dtype == torch.float32
            assert result[-1].item() == pytest.approx(303.0, abs=1e-3)
        assert made.counters()["cumsum.default"]["served"] == 4


def frozen_norm():
    x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
    y = nn.functional.layer_norm(x, (4,), torch.ones(4), torch.zeros(4))
    (y * torch.arange(12.0).reshape(3, 4)).sum().backward()
    return x.grad


@pytest.mark.parametrize("policy", ["proven", "all"])
def test_results_that_were_not_asked_for_may_be_missing(kernels, policy):
    op = "native_layer_norm_backward"
    root = kernels({op: aten(op)})
    arguments = {"normalized_shape": {"[int]*1": [4, 4]}, "output_mask": {"[True False False]": []}}
    prove(root, op, {f"{op}.default": {",".join(["float32"] * 6): {**ANY, "arguments": arguments}}})
    ended, counters = in_turns(root, frozen_norm, policy)
    assert is_one(ended)
    assert counters[f"{op}.default"]["served"] == 2


NOTHING = "import torch\ndef native_layer_norm_kernel_impl(*a):\n    return torch.ops.aten.native_layer_norm.default(*a)[0], None, None\n"


@pytest.mark.parametrize("policy", ["right", "all"])
def test_results_that_are_asked_for_may_not(kernels, policy):
    root = kernels({"native_layer_norm": NOTHING})
    arguments = {"normalized_shape": {"[int]*1": [4, 4]}, "eps": {"float": [1e-5, 1e-5]}}
    row = {**ANY, "arguments": arguments}
    prove(root, "native_layer_norm", {"native_layer_norm.default": {"float32,float32,float32": row}})
    wanted = frozen_norm()
    with (
        opforge.enabled(root, device="cpu", policy=policy),
        pytest.warns(KernelWarning, match="returned NoneType, not a tensor"),
    ):
        assert torch.equal(frozen_norm(), wanted)


@pytest.mark.parametrize("policy", ["proven", "all"])
def test_a_kernel_that_writes_may_decline(kernels, policy):
    root = kernels({"add_": "def add__kernel_impl(self, other, *, alpha=1):\n    raise NotImplementedError('no')\n"})
    prove(root, "add_", {"add_.Tensor": {"float32,float32": ANY}})
    ended, counters = in_turns(root, lambda: torch.ones(2).add_(torch.ones(2)), policy)
    assert is_one(ended)
    assert counters["add_.Tensor"] == {
        "kernel": "add__implementation_1",
        "served": 0,
        "aten": {"declined: NotImplementedError: no": 2},
    }


def overlapping(*, out):
    x = torch.arange(5.0)
    return torch.add(x[:-1], torch.ones(4), out=x[1:]) if out else x[1:].add_(x[:-1])


def into_itself(x):
    return torch.add(x, x, out=x), x.add_(x)


def rrelu():
    torch.manual_seed(0)
    noise = torch.zeros(4)
    return torch.ops.aten.rrelu_with_noise_(torch.arange(-2.0, 2.0), noise, training=True), noise


def foreach(make):
    tensors, others = make(torch.arange(3.0))
    torch._foreach_add_(tensors, others)
    return tensors


def gathered(x):
    return torch.gather(x, 0, torch.tensor([2, 1, 0]), out=x)


def added(x):
    return x.index_add_(0, torch.tensor([2, 1, 0]), x)


def squared(x):
    return torch.mm(x, x, out=x)


def expanded(write):
    return write(torch.zeros(1).expand(3))


def drawn(call):
    torch.manual_seed(0)
    return call(), torch.rand(2)


def lstm():
    torch.manual_seed(0)
    layer = nn.LSTM(4, 4)
    layer(torch.ones(2, 1, 4))[0].sum().backward()
    with torch.no_grad():
        return [p.grad for p in layer.parameters()], layer(torch.ones(2, 1, 4))[0]


HALF = torch.full((300,), 300.0, dtype=F16)
OUTS = {
    "a sum that is too large for its inputs' dtype": (
        "sum.dim_IntList",
        lambda: torch.sum(HALF, 0, out=torch.empty(())),
    ),
    "a running one": ("cumsum", lambda: torch.cumsum(HALF, 0, out=torch.empty(300))),
    "a factory": ("full", lambda: torch.full((2,), 0.1, out=torch.empty(2, dtype=F64))),
    "a line": ("linspace", lambda: torch.linspace(0, 1, 4, out=torch.empty(4, dtype=F64))),
    "ones that are integers": ("ones", lambda: torch.ones(2, out=torch.empty(2, dtype=torch.int64))),
    "a product of another dtype": (
        "mm",
        lambda: torch.mm(torch.eye(2), torch.eye(2), out=torch.empty(2, 2, dtype=F64)),
    ),
    "places of another dtype": (
        "argmax",
        lambda: torch.argmax(torch.ones(3), 0, out=torch.empty((), dtype=torch.int32)),
    ),
    "no cast": ("add.Tensor", lambda: torch.add(torch.ones(2), 1.5, out=torch.empty(2, dtype=torch.int64))),
    "strides": ("add.Tensor", lambda: torch.add(torch.ones(2, 3).t(), torch.ones(2, 3).t(), out=torch.empty(0))),
    "read from where it is written to": ("add.Tensor", lambda: overlapping(out=True)),
    "where it is written in place": ("add.Tensor", lambda: overlapping(out=False)),
    "in place, complex": ("abs", lambda: torch.tensor([1 + 1j]).abs_()),
    "one and the same": ("add.Tensor", lambda: into_itself(torch.arange(3.0))),
    "noise": ("rrelu_with_noise_functional", rrelu),
    "a list with one tensor twice": ("_foreach_add.Scalar", lambda: foreach(lambda x: ([x, x], 1.0))),
    "a list whose tensors overlap": ("_foreach_add.Scalar", lambda: foreach(lambda x: ([x[:2], x[1:]], 1.0))),
    "a list whose tensors do not": ("_foreach_add.Scalar", lambda: foreach(lambda x: ([x[:1], x[1:]], 1.0))),
    "lists crosswise": ("_foreach_add.List", lambda: foreach(lambda x: ([x[:1], x[1:2]], [x[1:2], x[:1]]))),
    "gathered into itself": ("gather", lambda: gathered(torch.arange(3.0))),
    "added to itself by index": ("index_add", lambda: added(torch.arange(3.0))),
    "a product into a factor": ("mm", lambda: squared(torch.eye(2))),
    "zeros to one place": ("zero", lambda: expanded(torch.Tensor.zero_)),
    "added in one place": ("add.Tensor", lambda: expanded(lambda x: x.add_(1))),
    "elsewhere": ("zeros_like", lambda: torch.zeros_like(torch.ones(2), device="meta").device.type),
    "random numbers without a device": ("rand", lambda: drawn(lambda: torch.ops.aten.rand([3]))),
    "random numbers of another dtype": (
        "bernoulli",
        lambda: drawn(lambda: torch.bernoulli(HALF / 600, out=torch.empty(300))),
    ),
    "what is kept for a backward pass": ("mkldnn_rnn_layer", lstm),
    "a shape to be found": ("abs", lambda: torch.abs(-torch.ones(2, 2), out=torch.empty(0))),
}


@pytest.mark.parametrize("name", OUTS)
def test_what_an_out_decides_it_decides(kernels, name):
    op, call = OUTS[name]
    ended, _ = in_turns(kernels({op.partition(".")[0]: aten(op)}), call)
    assert is_one(ended)


@pytest.mark.parametrize(
    ("op", "implements", "why"),
    [
        ("bernoulli_.float", "bernoulli.p", "in which p is optional"),
        ("rrelu_with_noise_.default", "rrelu_with_noise_functional.default", "which also writes to noise"),
        ("t_.default", "t.default", "which changes the geometry of its tensor"),
        ("add.Tensor", "add.out", r"\(out\) cannot replace add.Tensor \(functional\)"),
    ],
)
def test_forms_that_cannot_be_made_of_another_are_refused(op, implements, why):
    with pytest.raises(NotImplementedError, match=why):
        adapt(torch.relu, schema_of(op), schema_of(implements))


def test_an_out_of_another_shape_is_warned_of_as_by_aten(kernels):
    with (
        opforge.enabled(kernels({"abs": aten("abs")}), device="cpu", policy="all"),
        pytest.warns(UserWarning, match="An output with one or more elements was resized"),
    ):
        torch.abs(torch.ones(3), out=torch.ones(2))


WRONG = "import torch\ndef abs_kernel_impl(self):\n    return {}\n"


@pytest.mark.parametrize(("result", "words"), [("self[:1]", "the shape"), ("self.int()", "torch.int32")])
@pytest.mark.parametrize("out", [True, False])
def test_results_of_all_forms_are_looked_at(kernels, result, words, out):
    with opforge.enabled(kernels({"abs": WRONG.format(result)}), device="cpu", policy="all"):
        with pytest.warns(KernelWarning, match=words):
            found = torch.abs(-torch.ones(3), out=torch.empty(0)) if out else (-torch.ones(3)).abs_()
        assert found.tolist() == [1.0, 1.0, 1.0]


CAT = """
import numpy, torch
def cat_kernel_impl(tensors, dim=0):
    return torch.from_numpy(numpy.concatenate([t.numpy() for t in tensors], dim))
"""


@pytest.mark.parametrize("policy", ["proven", "all"])
def test_tensors_in_a_list_want_no_gradients_either(kernels, policy):
    root = kernels({"cat": CAT})
    prove(root, "cat", {"cat.default": {"[float32]*2": ANY}})
    w = torch.ones(2, requires_grad=True)
    with opforge.enabled(root, device="cpu", policy=policy) as made:
        (grad,) = torch.autograd.grad(torch.cat([w, 2 * w]).sum(), w)
        assert grad.tolist() == [3.0, 3.0]
        assert made.counters()["cat.default"]["served"] == 1


def norm_of_few():
    return nn.BatchNorm1d(2).eval()(torch.tensor([[1.0, 2.0]]))


def norm_of_halves():
    return nn.functional.layer_norm(torch.ones(2, 4, dtype=torch.bfloat16), (4,))


@pytest.mark.parametrize(("op", "call"), [("native_batch_norm", norm_of_few), ("native_layer_norm", norm_of_halves)])
def test_where_a_run_without_contents_differs_atens_answer_counts(kernels, op, call):
    ended, counters = in_turns(kernels({op: aten(op)}), call)
    assert is_one(ended)
    assert counters[f"{op}.default"]["served"] == 2


def test_what_results_are_like_follows_the_default_dtype_and_is_not_remembered_without_end(kernels, monkeypatch):
    i = torch.tensor([1, 2])
    with opforge.enabled(kernels({"add": aten("add.Tensor")}), device="cpu", policy="all"):
        assert torch.add(i, 2.5).dtype == torch.float32
        torch.set_default_dtype(F64)
        try:
            assert torch.add(i, 2.5).dtype == F64
        finally:
            torch.set_default_dtype(torch.float32)
    monkeypatch.setattr("opforge.runtime.results._MAX_CACHED_CALLS", 4)
    likeness = ResultCheck(schema_of("add.Tensor"))
    for n in range(10):
        likeness.check(i + n, (i, n), {})
    assert len(likeness._expected) <= 4
    with pytest.raises(TypeError, match=r"add\.Tensor returned torch\.float32, not torch\.int64"):
        likeness.check(i * 1.0, (i, 3), {})


MUL = "import torch\ndef mul_kernel_impl(self, other):\n    return torch.ops.aten.mul.Tensor(self, torch.tensor(other, dtype=self.dtype))\n"


def test_a_proof_with_integers_says_nothing_of_other_numbers(kernels):
    root = kernels({"mul": MUL})
    prove(root, "mul", {"mul.Tensor": {"int64,number(int)": ANY}})
    x = torch.tensor([1, 2])
    with opforge.enabled(root, device="cpu") as made:
        for _ in range(2):
            assert (x * 2).tolist() == [2, 4]
            assert (x * 2.5).tolist() == [2.5, 5.0]
            assert (x * True).tolist() == [1, 2]
        assert made.counters()["mul.Tensor"] == {
            "kernel": "mul_implementation_1",
            "served": 2,
            "aten": {"dtypes not proven": 4},
        }


def test_memory_that_begins_in_between_is_not_that_of_a_proof(kernels):
    root = kernels({"relu": aten("relu")})
    prove(root, "relu", {"relu.default": {"float32": {**ANY, "layouts": ["contiguous"]}}})
    whole = np.ones(16, np.float32)
    aligned = next(i for i in range(4) if whole[i:].ctypes.data % 16 == 0)
    with opforge.enabled(root, device="cpu") as made:
        for begin in (aligned, aligned + 1, aligned, aligned + 1):
            torch.relu(torch.from_numpy(whole[begin : begin + 8]))
        assert made.counters()["relu.default"]["served"] == 2
        assert made.counters()["relu.default"]["aten"] == {"layout not proven": 2}


@pytest.mark.parametrize("policy", ["proven", "all"])
def test_an_error_that_is_caught_keeps_nothing_alive(kernels, policy):
    root = kernels({"add": aten("add.Tensor")})
    prove(root, "add", {"add.Tensor": {"float32,float32": ANY}})
    with opforge.enabled(root, device="cpu", policy=policy):
        x = torch.ones(2)
        seen = weakref.ref(x)
        with contextlib.suppress(RuntimeError):
            x + torch.ones(3)
        del x
        assert seen() is None


def test_a_compiler_that_the_program_puts_in_place_stays(kernels, monkeypatch):
    before = torch.compile
    monkeypatch.setattr(torch, "compile", before)
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)  # as if nothing was compiled yet
    with opforge.enabled(kernels({"relu": aten("relu")}), device="cpu", policy="all"):
        assert torch.compile is not before
        assert torch.compile.__module__ == before.__module__
        mine = torch.compile = lambda f: f
    assert torch.compile is mine


def test_a_reset_of_the_compiler_is_no_harm(kernels):
    import torch._dynamo

    root = kernels({"relu": aten("relu")})
    with opforge.enabled(root, device="cpu", policy="all"):
        torch._dynamo.reset()
    with opforge.enabled(root, device="cpu", policy="all"):
        with pytest.warns(KernelWarning, match="torch.compile is used"):
            torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        torch._dynamo.reset()


def test_a_call_of_numbers_alone_is_not_cast_either(kernels):
    seen = (
        "import torch\ndef add_kernel_impl(self, other, *, alpha=1):\n"
        "    assert (torch.eye(2) @ torch.eye(2)).dtype == torch.float32\n    raise NotImplementedError\n"
    )
    root = kernels({"add": seen})
    prove(root, "add", {"add.Tensor": {"number(float),number(int)": ANY}})
    with opforge.enabled(root, device="cpu") as made:
        for enabled in (False, True):
            with torch.autocast("cpu", enabled=enabled):
                assert torch.add(1.5, 2).item() == 3.5
        assert made.counters()["add.Tensor"]["aten"] == {"declined: NotImplementedError: ": 2}
