"""swiglu and its gradient."""

import pytest
import torch
from support import DTYPES, SHAPES, check_compiled, check_fake, close, exact, layouts

from {{ cookiecutter.package }} import swiglu
from {{ cookiecutter.package }}.namespace import ops


def pair(*shape, device, dtype=torch.float32, requires_grad=False):
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=requires_grad) for _ in range(2)]


def expected(gate, up):
    gate, up = exact(gate, up)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_silu_times_up(shape, dtype, device):
    gate, up = pair(*shape, device=device, dtype=dtype)
    result = swiglu(gate, up)
    assert result.dtype == dtype
    close(result, expected(gate, up))


def test_any_layout_is_right_and_as_the_fake_says(device):
    gate, up = pair(3, 4, 5, device=device)
    for one in layouts(gate):
        for other in layouts(up):
            close(swiglu(one, other), expected(gate, up))
            check_fake(ops.swiglu, one, other)
            check_fake(ops.swiglu_backward, one, one, other)


def test_large_values_give_no_nan(device):
    gate = torch.tensor([-1e4, -200.0, 0.0, 200.0, 1e4], device=device)
    close(swiglu(gate, torch.ones_like(gate)), expected(gate, torch.ones_like(gate)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_those_of_pytorch(dtype, device):
    gate, up = pair(3, 5, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn(3, 5, device=device, dtype=dtype)
    actual = torch.autograd.grad(swiglu(gate, up), (gate, up), grad)
    wide = [tensor.requires_grad_() for tensor in exact(gate, up)]
    close(actual, torch.autograd.grad(torch.nn.functional.silu(wide[0]) * wide[1], wide, grad.double()))


def test_gradients_of_first_and_second_order(device):
    inputs = pair(2, 3, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(swiglu, inputs)
    assert torch.autograd.gradgradcheck(swiglu, inputs)


@pytest.mark.parametrize("shape", [(3, 5), (0, 4)], ids=str)
def test_it_keeps_the_contract(shape, device):
    gate, up = pair(*shape, device=device, requires_grad=True)
    torch.library.opcheck(ops.swiglu, (gate, up))
    torch.library.opcheck(ops.swiglu, (gate.detach().t().contiguous().t(), up.detach()))
    torch.library.opcheck(ops.swiglu_backward, (gate.detach(), gate, up))


def test_it_compiles_whole_for_several_sizes(device):
    check_compiled(
        lambda gate, up: swiglu(gate * 2, up) + 1,
        pair(3, 5, device=device, requires_grad=True),
        pair(4, 7, device=device, requires_grad=True),
    )


def test_vmap_is_a_loop(device):
    gate, up = pair(3, 4, 5, device=device)
    close(torch.vmap(swiglu, (1, 1), 1)(gate, up), expected(gate, up))
    close(torch.vmap(swiglu, (0, None))(gate, up[0]), expected(gate, up[0].expand_as(gate)))


def test_many_gradients_at_once_are_a_loop(device):
    gate, up = pair(4, 5, device=device, requires_grad=True)
    grads = torch.randn(3, 4, 5, device=device)
    at_once = torch.autograd.grad(swiglu(gate, up), (gate, up), grads, is_grads_batched=True)
    each = [torch.autograd.grad(swiglu(gate, up), (gate, up), grad) for grad in grads]
    torch.testing.assert_close(at_once, tuple(torch.stack(one) for one in zip(*each, strict=True)))


def test_wrong_arguments_are_refused(device):
    gate, up = pair(3, 4, device=device)
    with pytest.raises(ValueError, match=r"up has shape \(4, 3\), and gate has \(3, 4\)"):
        swiglu(gate, up.t())
    with pytest.raises(TypeError, match=r"up has dtype torch.float64, and gate has torch.float32"):
        swiglu(gate, up.double())
    with pytest.raises(TypeError, match=r"gate has dtype torch.int64; allowed: float32"):
        swiglu(gate.long(), up.long())
    with pytest.raises(TypeError, match="gate must be a Tensor, not list"):
        swiglu([1.0], up)
    with pytest.raises((RuntimeError, ValueError)):
        ops.swiglu(gate, up[:2])
