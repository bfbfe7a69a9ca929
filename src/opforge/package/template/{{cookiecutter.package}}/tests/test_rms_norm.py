"""rms_norm: an optional argument, and kernels that are tuned."""

import pytest
import torch
from support import DTYPES, ROWS, check_compiled, check_fake, close, exact, layouts

from {{ cookiecutter.package }} import rms_norm
from {{ cookiecutter.package }}.namespace import ops


def inputs(*shape, device, dtype=torch.float32, requires_grad=False):
    return [torch.randn(s, device=device, dtype=dtype, requires_grad=requires_grad) for s in (shape, shape[-1:])]


def expected(x, weight=None, eps=1e-6):
    (x,) = exact(x)
    result = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return result if weight is None else result * weight.detach().double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_it_is_the_norm_with_and_without_weight(shape, dtype, device):
    x, weight = inputs(*shape, device=device, dtype=dtype)
    assert rms_norm(x).dtype == dtype
    close(rms_norm(x), expected(x))
    close(rms_norm(x, weight), expected(x, weight))
    close(rms_norm(x, weight, eps=0.1), expected(x, weight, eps=0.1))


def test_any_layout_is_right_and_as_the_fake_says(device):
    x, weight = inputs(3, 4, 5, device=device)
    for one in layouts(x):
        check_fake(ops.rms_norm, one)
        for other in layouts(weight):
            close(rms_norm(one, other), expected(x, weight))
            check_fake(ops.rms_norm, one, other)


def test_gradients(device):
    x, weight = inputs(2, 4, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rms_norm, (x,))
    assert torch.autograd.gradcheck(rms_norm, (x, weight))
    assert torch.autograd.gradgradcheck(rms_norm, (x, weight))
    assert torch.autograd.gradcheck(rms_norm, (x[0], weight))


@pytest.mark.parametrize("shape", [(3, 5), (0, 4)], ids=str)
def test_it_keeps_the_contract(shape, device):
    x, weight = inputs(*shape, device=device, requires_grad=True)
    torch.library.opcheck(ops.rms_norm, (x,))
    torch.library.opcheck(ops.rms_norm, (x, weight, 0.1))
    torch.library.opcheck(ops.rms_norm, (x.detach().t().contiguous().t(), weight))


def test_it_compiles_whole_for_several_sizes(device):
    small, large = inputs(3, 5, device=device, requires_grad=True), inputs(4, 7, device=device, requires_grad=True)
    check_compiled(lambda x, weight: rms_norm(x * 2, weight) + 1, small, large)
    check_compiled(lambda x: rms_norm(x, eps=0.1), small[:1], large[:1])


def test_vmap_is_a_loop(device):
    x, weight = torch.randn(3, 4, 5, device=device), torch.randn(4, 5, device=device)
    close(torch.vmap(rms_norm, 1, 1)(x), expected(x))
    close(torch.vmap(rms_norm, (1, None), 1)(x, weight[0]), expected(x, weight[0]))
    close(torch.vmap(rms_norm, (1, 0), 1)(x, weight), expected(x, weight))
    close(torch.vmap(rms_norm, (None, 0), 1)(x[:, 0], weight), expected(x[:, :1].expand_as(x), weight))


def test_wrong_arguments_are_refused(device):
    x, weight = inputs(3, 4, device=device)
    with pytest.raises(ValueError, match=r"weight has shape \(3,\); it must be \(4,\)"):
        rms_norm(x, weight[:3])
    with pytest.raises(TypeError, match="weight has dtype torch.float64, and x has torch.float32"):
        rms_norm(x, weight.double())
    with pytest.raises(ValueError, match="x has no dimensions"):
        rms_norm(x[0, 0])
