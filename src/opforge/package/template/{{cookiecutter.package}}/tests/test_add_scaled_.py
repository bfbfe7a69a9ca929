"""add_scaled_: it writes into its argument."""

import pytest
import torch
from support import DTYPES, SHAPES, check_compiled, check_fake, close, exact, layouts

from {{ cookiecutter.package }} import add_scaled_
from {{ cookiecutter.package }}.namespace import ops


def pair(*shape, device, dtype=torch.float32):
    return [torch.randn(shape, device=device, dtype=dtype) for _ in range(2)]


def expected(x, y, alpha=1.0):
    x, y = exact(x, y)
    return x + alpha * y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_adds_in_place(shape, dtype, device):
    x, y = pair(*shape, device=device, dtype=dtype)
    for right, alpha in ((expected(x, y), None), (expected(x, y, 0.1), 0.1)):
        place = x.clone()
        result = add_scaled_(place, y) if alpha is None else add_scaled_(place, y, alpha)
        assert result is place
        close(place, right)


def test_any_layout_is_right_and_as_the_fake_says(device):
    x, y = pair(3, 4, 5, device=device)
    right = expected(x, y, 2.0)
    for other in layouts(y):
        for place in layouts(x):
            close(add_scaled_(place, other, 2.0), right)
            check_fake(ops.add_scaled_, place, other, 2.0)


def test_what_lies_beside_it_is_left_alone(device):
    whole = torch.zeros(3, 10, device=device)
    add_scaled_(whole[:, 2:8:2], torch.ones(3, 3, device=device))
    assert whole.sum() == 9
    assert whole[:, 2:8:2].sum() == 9


def test_arguments_may_share_memory(device):
    whole = torch.randn(3000, device=device)
    x, y = whole[1:], whole[:-1]
    right = expected(x, y)
    close(add_scaled_(x, y), right)
    right = expected(x, x, 0.5)
    close(add_scaled_(x, x, 0.5), right)


@pytest.mark.parametrize("shape", [(3, 5), (0, 4)], ids=str)
def test_it_keeps_the_contract(shape, device):
    x, y = pair(*shape, device=device)
    torch.library.opcheck(ops.add_scaled_, (x, y))
    torch.library.opcheck(ops.add_scaled_, (x.t().contiguous().t(), y, 0.5))


def test_it_compiles_whole_for_several_sizes(device):
    def function(x, y):
        x = x * 2
        add_scaled_(x, y, 0.5)
        return x + 1

    check_compiled(function, pair(3, 5, device=device), pair(4, 7, device=device))


def test_a_compiled_argument_is_written(device):
    x, y = pair(3, 5, device=device)
    right = expected(x, y)
    compiled = torch.compile(lambda x, y: add_scaled_(x, y), fullgraph=True, backend="aot_eager")
    compiled(x, y)
    close(x, right)


def test_vmap_is_a_loop(device):
    x, y = pair(3, 4, device=device)
    right = expected(x, y)
    torch.vmap(ops.add_scaled_, (1, 1), None)(x, y)
    close(x, right)
    with pytest.raises(ValueError, match="many results cannot be written into one x"):
        torch.vmap(ops.add_scaled_, (None, 0), None)(x[0], y)


def test_gradients_are_refused(device):
    x, y = pair(3, 4, device=device)
    with pytest.raises(RuntimeError, match="not differentiable, and y requires a gradient"):
        add_scaled_(x, y.requires_grad_())
    with torch.no_grad():
        add_scaled_(x, y)


def test_wrong_arguments_are_refused(device):
    x, y = pair(3, 4, device=device)
    with pytest.raises(ValueError, match=r"y has shape \(4,\), and x has \(3, 4\)"):
        add_scaled_(x, y[0])
    with pytest.raises(ValueError, match=r"elements of x share memory \(strides \(0, 1\)\); pass x.clone\(\)"):
        add_scaled_(x[:1].expand(3, 4), y)
    with pytest.raises(TypeError, match="y has dtype torch.float16, and x has torch.float32"):
        add_scaled_(x, y.half())
