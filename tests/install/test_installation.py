"""Kernels in ATen's place: what is put in answers, what declines falls back, and taking out restores PyTorch exactly."""

from __future__ import annotations

import threading

import pytest
import torch

from opforge.errors import UnknownNameError
from opforge.install import Installation, RefusedError
from opforge.install.install_kernel import install_kernel
from opforge.ops import table
from opforge.runtime.aten_kernels import dispatcher_dump
from opforge.sandbox.guest.loader import KernelLoadError

X = torch.tensor([-1.0, 0.5, 2.0])


def doubled(self):
    return torch.where(self > 0, 2 * self, 0)


def dumps():
    return {op.name: dispatcher_dump(op) for op in table()}


@pytest.fixture
def installed():
    with Installation() as installation:
        yield installation


def test_a_kernel_answers_and_is_counted(installed):
    installed.install("relu", doubled, kernel="mine")
    assert torch.equal(torch.relu(X), torch.tensor([0.0, 1.0, 4.0]))
    assert torch.equal(torch.nn.functional.relu(X), torch.tensor([0.0, 1.0, 4.0]))
    count = installed.counts["mine", "relu.default"]
    assert (count.answered, dict(count.fallbacks), count.raised) == (2, {}, "")
    assert installed.ops == ["relu.default"]


def test_taking_out_restores_every_operator_of_the_dispatcher():
    before, known = dumps(), set(torch.library._impls)
    one, other = Installation(), Installation()
    served = [op.name for op in table() if not op.composite and op.kind == "functional"]
    put = 0
    for number, op in enumerate(served):
        try:
            (one if number % 2 else other).install(op, doubled, kernel="all")
            put += 1
        except RefusedError as error:
            assert "no ATen kernel for CPU" in str(error)  # noqa: PT017  # one of some that CPUs do not have
    during = dumps()
    one.remove()  # in the order in which they were put, not its reverse
    other.remove()
    assert put > 800
    assert sum(during[op] != before[op] for op in served) == put
    assert dumps() == before
    assert set(torch.library._impls) == known
    assert torch.equal(torch.relu(X), torch.tensor([0.0, 0.5, 2.0]))


def test_what_is_taken_out_can_be_put_in_again(installed):
    for _ in range(2):
        installed.install("relu", doubled, kernel="mine")
        assert torch.relu(X)[2] == 4
        installed.remove()
        assert torch.relu(X)[2] == 2
    installed.remove()  # nothing is there, and nothing happens


def test_a_kernel_that_declines_is_answered_for_by_aten_with_its_reason(installed):
    def picky(self, other, *, alpha=1):
        raise NotImplementedError(f"not for {self.dtype}")

    installed.install("add.Tensor", picky, kernel="picky")
    assert torch.equal(X + 1, torch.tensor([0.0, 1.5, 3.0]))  # a plain number reaches ATen as it would have
    assert torch.equal(torch.add(X, X, alpha=2), 3 * X)
    assert (torch.tensor([1, 2]) + 0.5).dtype == torch.float32
    count = installed.counts["picky", "add.Tensor"]
    assert dict(count.fallbacks) == {
        "NotImplementedError: not for torch.float32": 2,
        "NotImplementedError: not for torch.int64": 1,
    }
    assert count.answered == 0


def test_reasons_for_falling_back_are_bounded(installed):
    def chatty(self):
        raise NotImplementedError(f"not {float(self[0])}")

    installed.install("relu", chatty, kernel="chatty")
    for number in range(20):
        torch.relu(X + number)
    reasons = installed.counts["chatty", "relu.default"].fallbacks
    assert len(reasons) == 9
    assert reasons["other reasons"] == 12


def test_what_a_kernel_raises_reaches_the_caller_unless_it_may_decline(installed):
    def broken(self):
        raise ValueError("a bug")

    installed.install("relu", broken, kernel="broken")
    installed.install("neg", broken, kernel="broken", required=False)
    with pytest.raises(ValueError, match="a bug"):
        torch.relu(X)
    assert installed.counts["broken", "relu.default"].raised == "ValueError: a bug"
    assert torch.equal(torch.neg(X), torch.tensor([1.0, -0.5, -2.0]))
    assert installed.counts["broken", "neg.default"].fallbacks == {"ValueError: a bug": 1}


@pytest.mark.parametrize(
    ("op", "result", "said"),
    [
        ("relu", None, "returned NoneType, not a tensor"),
        ("native_layer_norm", X, "returned Tensor, not 3 results"),
        ("split.Tensor", X, "returned Tensor, not a list of tensors"),
    ],
)
def test_results_that_the_schema_does_not_know_are_refused(installed, op, result, said):
    installed.install(op, lambda *_args, **_kwargs: result, kernel="odd")
    call = {
        "relu": lambda: torch.relu(X),
        "native_layer_norm": lambda: torch.native_layer_norm(X, [3], None, None, 1e-5),
        "split.Tensor": lambda: torch.split(X, 1),
    }[op]
    with pytest.raises(TypeError, match=said):
        call()


def test_inside_a_kernel_operators_are_atens_own(installed):
    def times(self, other):
        return torch.relu(self) * other  # its own operator, and another kernel's

    installed.install("mul.Tensor", times, kernel="times")
    installed.install("relu", lambda self: -1 * self, kernel="minus")
    assert torch.equal(torch.mul(X, X), torch.tensor([-0.0, 0.25, 4.0]))
    assert installed.counts["minus", "relu.default"].answered == 0
    assert torch.equal(torch.relu(X), -X)


def test_another_thread_is_not_inside(installed):
    seen = []

    def slow(self):
        thread = threading.Thread(target=lambda: seen.append(torch.neg(X)))
        thread.start()
        thread.join()
        return self.clone()

    installed.install("relu", slow, kernel="slow")
    installed.install("neg", lambda self: self.clone(), kernel="copy")
    torch.relu(X)
    assert torch.equal(seen[0], X)


def test_kernels_can_be_put_to_rest_for_a_while(installed):
    installed.install("relu", doubled, kernel="mine")
    with installed.active(active=False):
        assert torch.relu(X)[2] == 2
        with installed.active():
            assert torch.relu(X)[2] == 4
        assert torch.relu(X)[2] == 2
    assert torch.relu(X)[2] == 4
    assert installed.counts["mine", "relu.default"].answered == 2


def test_gradients_flow_by_atens_formulas(installed):
    seen = []

    def sigmoid(self):
        seen.append(self.requires_grad)
        return 1 / (1 + torch.exp(-self))

    from opforge.sandbox.guest.loader import without_gradients

    installed.install("sigmoid", without_gradients(sigmoid), kernel="mine")
    x = X.clone().requires_grad_()
    torch.sigmoid(x).sum().backward()
    s = 1 / (1 + torch.exp(-X))
    assert torch.allclose(x.grad, s * (1 - s))
    assert seen == [False]


@pytest.mark.parametrize("op", ["linear", "matmul", "layer_norm", "softmax.int"])
def test_composite_operators_are_refused_with_the_reason(installed, op):
    with pytest.raises(RefusedError, match=r"made of other operators .* cut off gradients"):
        installed.install(op, doubled, kernel="mine")
    assert installed.ops == []


def test_names_are_checked(installed):
    with pytest.raises(UnknownNameError, match="did you mean 'relu'"):
        installed.install("rellu", doubled, kernel="mine")
    with pytest.raises(RefusedError, match=r"_cudnn_rnn.default has no ATen kernel for CPU"):
        installed.install("_cudnn_rnn", doubled, kernel="mine")
    installed.install("relu", doubled, kernel="mine")
    with pytest.raises(RefusedError, match=r"relu.default is already overridden by mine"):
        installed.install("relu", doubled, kernel="yours")


def test_observers_see_both_ends_of_a_call(installed):
    class Seen(list):
        def before(self, kernel, op):
            self.append(("before", kernel, op))

        def after(self, kernel, op):
            self.append(("after", kernel, op))

    installed.observer = seen = Seen()
    installed.install_aten("relu", kernel="aten")
    assert torch.equal(torch.relu(X), torch.tensor([0.0, 0.5, 2.0]))
    assert seen == [("before", "aten", "relu.default"), ("after", "aten", "relu.default")]


RELU = "import torch\ndef relu_kernel_impl(self):\n    return torch.where(self > 0, 2 * self, 0)\n"


def described(root, op, ops):
    file = root / op / f"{op}_implementation_1.py"
    entries = [f"{op}_kernel_impl"]
    return {"name": file.stem, "primary": f"{op}.default", "file": str(file), "entries": entries}, [
        (o, True) for o in ops
    ]


def test_one_file_serves_its_family(installed, kernel_directory):
    root = kernel_directory({"relu": RELU})
    refused = install_kernel(
        installed, *described(root, "relu", ["relu.default", "relu_.default", "relu.out", "linear"])
    )
    assert list(refused) == ["linear"]
    x = X.clone()
    assert torch.relu_(x) is x
    assert x[2] == 4
    out = torch.empty(3)
    assert torch.ops.aten.relu.out(X, out=out) is out
    assert out[2] == 4
    w = X.clone().requires_grad_()
    y = w * 1
    torch.relu_(y)
    y.sum().backward()
    assert torch.equal(w.grad, torch.tensor([0.0, 1.0, 1.0]))


def test_kernels_may_have_modules_of_the_same_name_beside_them(installed, kernel_directory):
    root = kernel_directory(
        {
            "relu": "from helpers import N\ndef relu_kernel_impl(self):\n    return self + N\n",
            "neg": "from helpers import N\ndef neg_kernel_impl(self):\n    return self + N\n",
        }
    )
    for op, number in (("relu", 10), ("neg", 20)):
        (root / op / "helpers.py").write_text(f"N = {number}\n")
        assert install_kernel(installed, *described(root, op, [f"{op}.default"])) == {}
    assert torch.relu(X)[2] == 12
    assert torch.neg(X)[2] == 22


def test_a_file_that_cannot_be_loaded_says_why(installed, kernel_directory):
    root = kernel_directory({"relu": "import torch\nraise RuntimeError('no')\n"})
    with pytest.raises(KernelLoadError, match=r"relu_implementation_1\.py raised while loading: RuntimeError: no"):
        install_kernel(installed, *described(root, "relu", ["relu.default"]))
    assert installed.ops == []
