"""New contents for the inputs of timed calls: of the same kind, others for each seed, and the same ones wherever they are made."""

from __future__ import annotations

import pytest
import torch

from opforge.cases.tensors import (
    Renewal,
    flat_storage,
    owned_copy,
    renewed,
    seeded_bytes,
    tensor_from_row,
    words_of,
)
from opforge.cases.values import DTYPES, TensorSpec

SEEDS = [3, 1, 1_000_000_007, 12]
SMALL, LARGER = (5, 7), (61, 97)
"""Shapes of a small and a larger tensor."""


def made(spec: TensorSpec) -> torch.Tensor:
    """Return a tensor with seeded contents."""
    row = [0, spec.storage_nbytes, spec.dtype, list(spec.shape), list(spec.strides), spec.offset, None]
    return owned_copy(tensor_from_row(bytearray(seeded_bytes(spec, "a tensor").tobytes()), row))


def contents(tensor: torch.Tensor, *, positions: bool = False) -> list[bytes]:
    """Return the bytes that a tensor's memory gets for each of the seeds."""
    rows = Renewal(words_of(tensor), tensor.dtype, positions=positions).contents(SEEDS)
    return [row.contiguous().view(torch.uint8).cpu().numpy().tobytes() for row in rows]


def memory(tensor: torch.Tensor) -> bytes:
    return flat_storage(tensor).numpy().tobytes()


@pytest.mark.parametrize("shape", [SMALL, LARGER, (), (1,), (0, 3)])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_many_are_renewed_as_one_is(dtype, shape):
    tensor = made(TensorSpec(shape, dtype))
    assert contents(tensor) == [memory(renewed(owned_copy(tensor), seed)) for seed in SEEDS]


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "f64", "c64", "c128"])
@pytest.mark.parametrize("shape", [SMALL, LARGER])
def test_floats_differ_from_seed_to_seed(dtype, shape):
    tensor = made(TensorSpec(shape, dtype))
    assert len({memory(tensor), *contents(tensor)}) == 5


@pytest.mark.parametrize("dtype", ["i64", "i32", "u8"])
def test_integers_that_may_be_indices_stay(dtype):
    tensor = made(TensorSpec(SMALL, dtype))
    assert contents(tensor, positions=True) == [memory(tensor)] * 4
    floats = made(TensorSpec(SMALL, "f32"))
    assert memory(floats) not in contents(floats, positions=True)


@pytest.mark.parametrize("scale", [1, 40])
@pytest.mark.parametrize(
    ("shape", "stride", "offset"),
    [
        ((6, 8), (1, 6), 0),
        ((6, 8), (16, 2), 3),
        ((6, 8), (0, 1), 0),
        ((6, 8), (8, 1), 5),
        ((6, 8), (0, 0), 0),
    ],
    ids=["transposed", "strided", "expanded", "offset", "one element"],
)
def test_geometry_stays_and_all_of_the_memory_is_renewed(shape, stride, offset, scale):
    scaled = (shape[0] * scale, shape[1])
    stride = (stride[0], stride[1] * scale) if stride == (1, 6) else stride
    tensor = made(TensorSpec(scaled, "f32", stride, offset))
    other = renewed(owned_copy(tensor), SEEDS[0])
    assert (other.shape, other.stride(), other.storage_offset()) == (tensor.shape, tensor.stride(), offset)
    assert contents(tensor)[0] == memory(other)
    assert sorted(words_of(other).sign().tolist()) == sorted(words_of(tensor).sign().tolist())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [SMALL, LARGER, (1,), (0, 3)])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_contents_on_a_gpu_are_those_on_the_host(dtype, shape):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    tensor = made(TensorSpec(shape, dtype))
    assert contents(tensor.cuda()) == contents(tensor)
