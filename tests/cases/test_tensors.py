from __future__ import annotations

import hashlib
import subprocess
import sys

import numpy as np
import pytest
import torch

from opforge.cases import Case, Expect, TensorSpec, Test
from opforge.cases.case_files import BlobWriter, open_blob, read_table, write_table
from opforge.cases.tensors import flat_bytes, owned_copy, same_bytes, seeded_bytes, tensor_from_row, to_float64
from opforge.cases.values import DTYPES
from opforge.cases.wire import TORCH_DTYPES

DIGEST = """
import hashlib
from opforge.cases import TensorSpec
from opforge.cases.tensors import seeded_bytes
from opforge.cases.values import DTYPES
h = hashlib.sha256()
for dtype in sorted(DTYPES):
    h.update(seeded_bytes(TensorSpec((7, 5), dtype, low=1 if dtype == "i32" else None), f"seed-{dtype}").tobytes())
print(h.hexdigest())
"""


@pytest.mark.slow
def test_seeded_tensors_are_the_same_in_any_process():
    first, second = (
        subprocess.run([sys.executable, "-c", DIGEST], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )
    here = hashlib.sha256()
    for dtype in sorted(DTYPES):
        spec = TensorSpec((7, 5), dtype, low=1 if dtype == "i32" else None)
        here.update(seeded_bytes(spec, f"seed-{dtype}").tobytes())
    assert first.strip() == second.strip() == here.hexdigest()


def test_another_seed_gives_other_contents():
    spec = TensorSpec((16,), "f32")
    assert seeded_bytes(spec, "a").tobytes() != seeded_bytes(spec, "b").tobytes()


def test_ranges_are_kept():
    spec = TensorSpec((1000,), "i64", low=3, high=5)
    assert set(seeded_bytes(spec, "x").view(np.int64).tolist()) == {3, 4}


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec((3, 4), "f32"),
        TensorSpec((4, 3), "f32", (1, 4)),
        TensorSpec((3, 4), "f32", (0, 1), 2),
        TensorSpec((), "f32"),
        TensorSpec((0, 3), "f32"),
        TensorSpec((1, 1), "f32", (5, 7)),
    ],
)
def test_tensors_over_shared_bytes_have_the_geometry_of_their_spec(dtype, spec):
    spec = TensorSpec(spec.shape, dtype, spec.stride, spec.offset)
    contents = np.zeros(spec.storage_nbytes + 64, np.uint8)
    contents[64:] = seeded_bytes(spec, "x")
    row = [64, spec.storage_nbytes, dtype, list(spec.shape), list(spec.strides), spec.offset, None]
    tensor = tensor_from_row(contents, row)
    assert (tensor.shape, tensor.stride(), tensor.dtype) == (torch.Size(spec.shape), spec.strides, TORCH_DTYPES[dtype])
    copy = owned_copy(tensor)
    assert copy.stride() == tensor.stride()
    assert torch.equal(flat_bytes(copy), flat_bytes(tensor))
    assert not copy._is_view()
    if tensor.numel():
        assert copy.data_ptr() != tensor.data_ptr()


def test_cases_and_tensors_survive_the_disk(tmp_path):
    cases = [
        Case.make("add.Tensor", "((T([2], f32, at=0), T([2], f32, at=64)), {})", source="x forward"),
        Case.make("add.out", "((1,), {})", expect=Expect.RAISES),
    ]
    write_table(tmp_path / "cases.parquet", cases)
    assert read_table(tmp_path / "cases.parquet") == cases
    assert read_table(tmp_path / "cases.parquet", ["add.out"]) == cases[1:]
    assert read_table(tmp_path / "cases.parquet", []) == []

    writer = BlobWriter(tmp_path / "t.safetensors")
    places = [writer.add(contents, contents) for contents in (b"abc", b"defgh", b"abc")]
    writer.close()
    blob = open_blob(tmp_path / "t.safetensors")
    assert places == [0, 64, 0]
    assert blob[64:69].tobytes() == b"defgh"

    from safetensors.numpy import load_file

    assert load_file(tmp_path / "t.safetensors")["bytes"][:3].tobytes() == b"abc"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.complex128, torch.float8_e5m2])
def test_bits_are_compared_whatever_the_layout(dtype):
    x = torch.arange(6.0).reshape(2, 3).to(dtype)
    other = x.clone()
    other.view(torch.uint8).view(-1)[-1] ^= 1
    for layout in (x.clone(), x.t().contiguous().t()):
        assert same_bytes(x, layout)
        assert not same_bytes(other, layout)


def test_zeros_and_nans_are_told_apart_by_their_bits():
    assert not same_bytes(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bytes(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    z = torch.tensor([1 + 2j])
    assert same_bytes(z.conj(), torch.tensor([1 - 2j]))


def test_the_widest_dtype_of_a_kind():
    assert to_float64(torch.ones(1, dtype=torch.bfloat16)).dtype == torch.float64
    assert to_float64(torch.ones(1, dtype=torch.complex64)).dtype == torch.complex128


def test_ids_tell_cases_apart():
    ids = {
        Case.make("a.b", "((1,), {})").id,
        Case.make("a.c", "((1,), {})").id,
        Case.make("a.b", "((2,), {})").id,
        Case.make("a.b", "((1,), {})", contents="x").id,
        Case.make("a.b", "((1,), {})", expect=Expect.RAISES).id,
    }
    assert len(ids) == 5


def test_test_makes_its_inputs_anew():
    test = Test(lambda: torch.ones(2), 3, [1, 2], dim=lambda: 0, dtype=torch.int8)
    assert test.args[0] is not test.args[0]
    assert test.args[1:] == [3, [1, 2]]
    assert test.kwargs == {"dim": 0, "dtype": torch.int8}
    with pytest.raises(TypeError, match="neither a callable nor a plain value"):
        Test(torch.ones(2))


def test_the_known_import_gives_the_same_class():
    from BackendBench.suite.base import Test as Known

    assert Known is Test
