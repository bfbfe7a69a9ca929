"""The bound on errors: what it lets through, and what it does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from opforge.cases.tensors import same_bytes
from opforge.cases.wire import SHORT_DTYPES
from opforge.judge.compare.numerics import Comparison
from opforge.judge.compare.properties.signed_zeros import zero_signs_matter
from opforge.judge.reference.aten import Float64Answers, ReferenceCall
from opforge.judge.verdict import RejectedError
from opforge.ops import table


def call(op: str, *tensors: torch.Tensor, extra: tuple[object, ...] = (), **kwargs: object) -> ReferenceCall:
    """Return a call over a copy of some contiguous tensors, as the judge has it."""
    buffer = bytearray()
    rows = []
    for tensor in tensors:
        contents = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        rows.append(
            [len(buffer), len(contents), SHORT_DTYPES[tensor.dtype], list(tensor.shape), list(tensor.stride()), 0, None]
        )
        buffer += contents + bytes(-len(contents) % 64)
    args = [*({"T": row} for row in rows), *extra]
    return ReferenceCall(op, args, kwargs, bytearray(buffer), torch.device("cpu"), owns_storage=False)


def check(made: ReferenceCall, kernel: torch.Tensor, reduction: float = 1.0) -> dict[str, float]:
    return Comparison(kernel, made.run().result, Float64Answers(made), 0, "result", reduction).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_other_ways_to_the_same_number_pass(dtype):
    x = torch.randn(200, dtype=dtype)
    wide = x.to(torch.complex64 if dtype.is_complex else torch.float32)
    check(call("sigmoid.default", x), (1 / (1 + torch.exp(-wide))).to(dtype))


@pytest.mark.parametrize("n", [10, 1000, 100_000])
def test_sums_in_another_order_pass_even_where_they_cancel(n):
    x = torch.randn(n) * 10
    x = torch.cat([x, -x + 1e-3 * torch.randn(n)])
    sequential = torch.tensor(float(torch.cumsum(x.flip(0), 0)[-1]))
    check(call("sum.default", x), sequential, reduction=2.0 * n)


def test_products_of_matrices_by_another_algorithm_pass():
    a, b = torch.randn(64, 300), torch.randn(300, 48)
    total = torch.zeros(64, 48)
    for k in range(300):
        total += a[:, k : k + 1] * b[k : k + 1]
    check(call("mm.default", a, b), total, reduction=300.0)


def test_accumulating_in_a_lower_precision_is_wrong():
    a, b = torch.randn(32, 256).bfloat16(), torch.randn(256, 32).bfloat16()
    total = torch.zeros(32, 32, dtype=torch.bfloat16)
    for k in range(256):
        total += a[:, k : k + 1] * b[k : k + 1]
    with pytest.raises(RejectedError, match="allowed"):
        check(call("mm.default", a, b), total, reduction=256.0)


def test_lower_precision_than_the_dtype_promises_is_wrong():
    x = torch.randn(100)
    with pytest.raises(RejectedError):
        check(call("exp.default", x), torch.exp(x.half()).float())


@pytest.mark.parametrize("make", [torch.zeros_like, lambda r: torch.full_like(r, r.mean()), lambda r: r * 1.001])
def test_zeros_constants_and_near_misses_are_wrong(make):
    x = torch.randn(100) * 0.01 - 3
    right = torch.exp(x)
    with pytest.raises(RejectedError):
        check(call("exp.default", x), make(right))


def test_small_elements_beside_large_ones_must_be_right_too():
    x = torch.tensor([50.0, -50.0])
    with pytest.raises(RejectedError, match="1 of 2"):
        check(call("exp.default", x), torch.exp(x) * torch.tensor([1.0, 0.0]))


def test_a_jump_is_no_excuse():
    x = torch.tensor([2.0, 3.0, 2.5])
    with pytest.raises(RejectedError):
        check(call("floor.default", x), torch.tensor([1.0, 3.0, 2.0]))


def test_nan_and_inf_must_be_where_aten_has_them():
    x = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")])
    right = torch.relu(x)
    check(call("relu.default", x), right.clone())
    for index, value in ((1, 0.0), (2, 3e38), (0, float("nan")), (2, -float("inf"))):
        bad = right.clone()
        bad[index] = value
        with pytest.raises(RejectedError, match="NaN or inf"):
            check(call("relu.default", x), bad)


def test_the_worst_element_is_shown_with_its_own_bound():
    x = torch.tensor([[1e6, 1.0], [2.0, 1e-3]])
    bad = torch.sigmoid(x)
    bad[0, 0] += 1e-3
    bad[1, 1] += 1e-3
    bad[1, 0] += 0.5
    reason = r"3 of 4 elements: error 0\.5, allowed .*; worst at \[1, 0\]: got 1\.38"
    with pytest.raises(RejectedError, match=reason) as found:
        check(call("sigmoid.default", x), bad)
    figures = found.value.verdict.figures
    assert figures["kernel_error"] == pytest.approx(0.5, rel=1e-3)
    assert 0 < figures["bound"] < 1e-5
    scaled = torch.mul(x, 3.0)
    scaled[0, 0] += 1.0  # the largest error; of an element that is allowed more
    scaled[1, 1] += 0.25
    reason = r"error 0\.25, allowed \S+e-\d+ .*worst at \[1, 1\]: got 0\.25299"
    with pytest.raises(RejectedError, match=reason) as found:
        check(call("mul.Scalar", x, extra=(3.0,)), scaled)
    assert found.value.verdict.figures["bound"] < 1e-8


def test_integers_must_be_equal():
    x = torch.arange(10)
    with pytest.raises(RejectedError, match=r"1 of 10 .* first at \[3\]: got 99, ATen has 3"):
        bad = x.clone()
        bad[3] = 99
        check(call("abs.default", x), bad)


def test_the_figures_are_given():
    x = torch.randn(100)
    figures = check(call("exp.default", x), torch.exp(x.double()).float() * (1 + 2e-7))
    assert 0 < figures["kernel_error"] <= figures["bound"]
    assert figures["aten_error"] < figures["kernel_error"]


def test_without_a_float64_form_tolerances_decide():
    x = torch.randn(4, 4).to(torch.bfloat16)
    made = call("_to_copy.default", x, dtype={"dtype": "bf16"})
    check(made, x.clone())
    assert same_bytes(x, x.clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.float8_e5m2])
def test_figures_are_given_where_the_bits_are_atens_too(dtype):
    x = torch.randn(50).to(dtype)
    op = "clone.default" if dtype.itemsize == 1 else "exp.default"
    made = call(op, x)
    figures = check(made, made.run().result)
    assert figures["kernel_error"] == figures["aten_error"] <= figures["bound"]
    assert (figures["aten_error"] > 0) == (op == "exp.default")


def test_integers_have_figures_too():
    x = torch.randn(50)
    assert check(call("argsort.default", x), x.argsort()) == {"kernel_error": 0.0, "aten_error": 0.0, "bound": 0.0}


def test_a_kernel_that_does_not_overflow_where_aten_does_is_right():
    x = torch.tensor([3e38, 3e38, -3e38, -3e38])
    made = call("cumsum.default", x, extra=(0,))
    aten = made.run().result
    assert not torch.isfinite(aten).all()
    check(made, x.double().cumsum(0).float(), reduction=4.0)
    with pytest.raises(RejectedError, match="NaN or inf"):
        check(made, torch.zeros(4), reduction=4.0)


def test_where_aten_combines_infinities_to_nan_infinite_is_right_but_not_where_an_input_is_nan():
    aten = torch.tensor([float("nan"), float("nan")])
    kernel = torch.tensor([float("inf"), float("inf")])
    made = call("clone.default", aten)

    def compared(undecided: list[bool]) -> dict[str, float]:
        return Comparison(kernel, aten, Float64Answers(made), 0, "result", 1.0, lambda: torch.tensor(undecided)).check()

    compared([True, True])
    with pytest.raises(RejectedError, match="1 of 2 elements: NaN or inf"):
        compared([True, False])


@pytest.mark.parametrize("seed", range(40))
def test_float64_sums_that_cancel_pass_in_any_order_and_not_when_they_are_off_by_more(seed):
    x = torch.randn(24, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x[-1] -= x.sum() - 1e-3 * x[0]
    made = call("sum.default", x)
    check(made, x.flip(0).cumsum(0)[-1], reduction=24.0)
    with pytest.raises(RejectedError, match="allowed"):
        check(made, x.sum() + 1e-12, reduction=24.0)


def test_an_infinity_times_nearly_zero_may_have_any_sign_but_not_become_a_number():
    x = torch.tensor([[-1.0, -1.0, 1.0, 0.0, -0.0, 1.0]])
    weight, bias = torch.tensor([1.0, 1.0, 1.0, 1.0, -torch.inf, 1.0]), torch.zeros(6)
    made = call("native_layer_norm.default", x, weight, bias)
    made = replace(made, args=[made.args[0], [6], *made.args[1:], 1e-5])
    aten = made.run().result[0]
    assert aten[0, 4].isinf()
    for there, right in ((torch.nan, True), (-torch.inf, True), (torch.inf, True), (0.0, False)):
        kernel = aten.clone()
        kernel[0, 4] = there
        comparison = Comparison(kernel, aten, Float64Answers(made), 0, "result", 1.0)
        if right:
            comparison.check()
        else:
            with pytest.raises(RejectedError, match="NaN or inf not where ATen has it"):
                comparison.check()


class Wavering:
    """A call that ATen answers a little differently each time, and that has no float64 form."""

    tensors = None

    def __init__(self, answers: list[torch.Tensor]) -> None:
        self._answers = answers

    def reruns(self) -> Iterator[list[torch.Tensor]]:
        return iter([answer] for answer in self._answers)


def test_aten_that_wavers_without_a_float64_form_is_allowed_for_as_far_as_it_wavers():
    aten = torch.full((4,), 10.0)
    apart = torch.tensor([3e-5, 0.0, 0.0, 0.0])

    def compared(kernel: torch.Tensor, again: torch.Tensor) -> None:
        Comparison(kernel, aten, Wavering([again] * 8), 0, "result", 1.0).check()  # type: ignore[arg-type]

    compared(aten + apart, aten - apart)
    reason = r"error 2.96e-05, allowed 2.3e-05 \(rtol 1.3e-06, atol 1e-05; no float64 form\); worst at \[0\]"
    with pytest.raises(RejectedError, match=reason):
        compared(aten + apart, aten)
    with pytest.raises(RejectedError):
        compared(aten + 100 * apart, aten - apart)


def test_an_element_that_was_steady_in_a_few_runs_is_not_held_to_be_so():
    generator = torch.Generator().manual_seed(0)
    aten = torch.full((1000,), 10.0)

    def noise() -> torch.Tensor:
        return 1e-4 * torch.randn(1000, generator=generator)

    runs = [aten + noise() for _ in range(8)]
    for run in runs:
        run[7] = aten[7]  # by luck
    kernel = aten + noise().clamp(-2e-4, 2e-4)
    kernel[7] += 2e-4
    Comparison(kernel, aten, Wavering(runs), 0, "result", 1.0).check()  # type: ignore[arg-type]
    kernel[7] += 1e-2
    with pytest.raises(RejectedError, match="1 of 1000 elements"):
        Comparison(kernel, aten, Wavering(runs), 0, "result", 1.0).check()  # type: ignore[arg-type]


def test_an_element_that_was_steady_in_a_few_runs_may_waver_beside_a_float64_form_too():
    exact, aten = torch.full((4, 8), 10.0, dtype=torch.float64), torch.full((4, 8), 10.0, dtype=torch.float16)
    again = aten.clone()
    again[1, 0] += 0.25  # in one row, once

    def compared(row: int, off: float) -> None:
        made = Wavering([again, *[aten] * 7])
        made.tensors, made.perturbed = [exact], lambda *_: ()
        kernel = aten.clone()
        kernel[row, 5] += off
        Comparison(kernel, aten, made, 0, "result", 1.0).check()  # type: ignore[arg-type]

    compared(1, 0.9)
    for row, off in ((1, 1.5), (2, 0.9)):
        with pytest.raises(RejectedError, match="1 of 32 elements"):
            compared(row, off)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_zeros_have_the_signs_of_atens_where_these_are_certain(dtype):
    made = call("trunc.default", torch.tensor([-0.5, 0.0, -0.0, 1.5], dtype=dtype))
    aten = made.run().result

    def signs(kernel, *, signed_zeros=True):
        Comparison(kernel, aten, Float64Answers(made), 0, "result", 1.0, zero_signs_matter=signed_zeros).check()

    signs(aten.clone())
    signs(aten + 0.0, signed_zeros=False)
    with pytest.raises(RejectedError, match="2 of 4 elements: the sign of zero is not ATen's"):
        signs(aten + 0.0)


def test_no_sign_is_asked_for_where_zeros_are_compared_or_summed():
    named = {op.name: op for op in table()}
    for op in ("trunc.default", "sin_.default", "flip.default", "cat.out", "mul.Tensor"):
        assert zero_signs_matter(named[op]), op
    for op in (
        "relu.default",
        "clamp_.default",
        "maximum.default",
        "sum.default",
        "mm.default",
        "tanh_backward.default",
    ):
        assert not zero_signs_matter(named[op]), op


def test_operators_that_write_to_their_inputs_get_fresh_ones_at_each_step_of_each_seed():
    summands = torch.arange(6).reshape(2, 3)
    factors = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    for made, is_moved in (
        (call("add_.Tensor", summands, summands), False),
        (call("mul_.Tensor", factors, factors), True),
    ):
        answers = [
            found for both in Float64Answers(made).perturbed((1, -1, 2, 1), 2.0**-20, 2.0**-24) for found in both
        ]
        (exact, *_) = Float64Answers(made).tensors or ()
        moves = [(answer[0] - exact).double() for answer in answers if answer]
        assert torch.equal(moves[0], moves[6])
        assert bool(moves[0].any()) is is_moved
        assert torch.allclose(moves[0], -moves[2], rtol=1e-3, atol=0)  # a mirror image
        assert torch.allclose(moves[0], 16 * moves[1], rtol=1e-3, atol=0)  # a larger step the same way
        assert torch.equal(moves[0], moves[4]) is not is_moved
