"""row_moments: several results."""

import pytest
import torch
from support import DTYPES, ROWS, check_compiled, check_fake, close, exact, layouts

from {{ cookiecutter.package }} import row_moments
from {{ cookiecutter.package }}.namespace import ops


def expected(x):
    (x,) = exact(x)
    return x.mean(-1), (x - x.mean(-1, keepdim=True)).square().mean(-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_it_is_mean_and_variance(shape, dtype, device):
    x = torch.randn(shape, device=device, dtype=dtype)
    mean, variance = row_moments(x)
    assert mean.dtype == variance.dtype == dtype
    close((mean, variance), expected(x))


def test_a_small_variance_beside_a_large_mean(device):
    x = torch.randn(4, 100, device=device) + 1000
    torch.testing.assert_close(row_moments(x)[1].double(), expected(x)[1], rtol=1e-4, atol=0)


def test_any_layout_is_right_and_as_the_fake_says(device):
    x = torch.randn(3, 4, 5, device=device)
    for one in layouts(x):
        close(row_moments(one), expected(x))
        check_fake(ops.row_moments, one)


def test_gradients(device):
    x = torch.randn(2, 5, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(row_moments, (x,))
    assert torch.autograd.gradgradcheck(row_moments, (x,))


@pytest.mark.parametrize("shape", [(3, 5), (0, 4)], ids=str)
def test_it_keeps_the_contract(shape, device):
    x = torch.randn(shape, device=device, requires_grad=True)
    torch.library.opcheck(ops.row_moments, (x,))
    torch.library.opcheck(ops.row_moments, (x.detach().t().contiguous().t(),))


def test_it_compiles_whole_for_several_sizes(device):
    def standardised(x):
        mean, variance = row_moments(x * 2)
        return (x - mean[:, None]) / (variance[:, None] + 1)

    sizes = [(3, 5), (4, 7)]
    check_compiled(standardised, *[(torch.randn(size, device=device, requires_grad=True),) for size in sizes])


def test_vmap_is_a_loop(device):
    x = torch.randn(3, 4, 5, device=device)
    close(torch.vmap(row_moments, 1, 1)(x), expected(x))
    with pytest.raises(ValueError, match="x has no dimensions under vmap"):
        torch.vmap(ops.row_moments)(x[0, 0])


def test_wrong_arguments_are_refused(device):
    with pytest.raises(ValueError, match="x has no dimensions; it needs at least one"):
        row_moments(torch.tensor(1.0, device=device))
    with pytest.raises(TypeError, match="x has dtype torch.int64; allowed: float32"):
        row_moments(torch.arange(3, device=device))
