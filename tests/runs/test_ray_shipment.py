"""What is shipped to a node, and how it lies there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from opforge.kernels import Kernel, Reference, ServedOperator
from opforge.runs.execute.ray import shipment
from opforge.runs.execute.ray.shipment import blob_digest, blob_pieces, fetch_blob, pack, unpack
from opforge.runs.plan import Job
from opforge.runs.rows import ResultRow


@pytest.fixture(autouse=True)
def node_cache(tmp_path, monkeypatch):
    """A node's cache, of which nothing is known yet."""
    monkeypatch.setenv("OPFORGE_CACHE", str(tmp_path / "node"))
    shipment._sweep.cache_clear()
    return tmp_path / "node" / "shipped"


def written(root: Path, **files: str) -> Job:
    root.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / f"{name}.py").write_text(text)
    reference = Reference("reference", str(root / "reference.py"))
    return Job(
        Kernel("k", "relu.default", (ServedOperator("relu.default"),), str(root / "kernel.py"), reference=reference), ()
    )


def test_a_kernel_its_helpers_and_its_reference_arrive(tmp_path, node_cache):
    job = written(tmp_path / "here", kernel="import helper", helper="x = 1", reference="y = 2")
    (tmp_path / "here" / "kernel.proof.json").write_text("{}")
    there = unpack(pack(job))
    kernel = there.job.kernel
    assert Path(kernel.file).read_text() == "import helper"
    assert Path(kernel.file).with_name("helper.py").read_text() == "x = 1"
    assert Path(kernel.reference.file).read_text() == "y = 2"
    assert Path(kernel.file).is_relative_to(node_cache)
    assert sorted(p.name for p in Path(kernel.file).parent.iterdir()) == ["helper.py", "kernel.py", "reference.py"]
    head = {"op": "a.x", "kernel": "k", "verdict": "error"}
    (told,) = there.wire_rows([ResultRow.from_wire({**head, "reason": f"{kernel.file} cannot be read"})])
    assert told["reason"] == f"{tmp_path / 'here' / 'kernel.py'} cannot be read"


def test_the_same_files_lie_there_once_and_others_beside_them(tmp_path, node_cache):
    one = unpack(pack(written(tmp_path / "a", kernel="1", reference="")))
    same = unpack(pack(written(tmp_path / "b", kernel="1", reference="")))
    other = unpack(pack(written(tmp_path / "a", kernel="2", reference="")))
    assert one.job.kernel.file == same.job.kernel.file != other.job.kernel.file
    assert len(list((node_cache / "kernels").iterdir())) == 2


def test_a_kernel_without_a_file_and_one_whose_file_is_gone(tmp_path):
    own = Job(Kernel("aten", "relu.default", ()), ())
    assert unpack(pack(own)).job == own
    gone = Job(Kernel("k", "relu.default", (), str(tmp_path / "nowhere" / "kernel.py")), ())
    assert not Path(unpack(pack(gone)).job.kernel.file).exists()


def test_a_kernel_of_too_much_is_the_reason_of_the_verdicts(tmp_path, monkeypatch):
    monkeypatch.setattr(shipment, "MAX_KERNEL_BYTES", 1 << 20)
    job = written(tmp_path / "here", kernel="import data", reference="", data="#" * (2 << 20))
    packed = pack(job)
    assert "take more than 1 MiB" in packed.job.kernel.broken
    assert not packed.bundles


def test_stored_tensors_are_asked_for_once(tmp_path, monkeypatch):
    monkeypatch.setattr(shipment, "PIECE_BYTES", 10)
    blob = tmp_path / "blob"
    blob.write_bytes(bytes(range(35)))
    pieces = list(blob_pieces(blob))
    assert list(map(len, pieces)) == [10, 10, 10, 5]
    path = fetch_blob(blob_digest(blob), [lambda piece=piece: piece for piece in pieces])
    assert path.read_bytes() == blob.read_bytes()
    assert fetch_blob(blob_digest(blob), [lambda: pytest.fail("asked again")]) == path


def test_what_nobody_has_used_for_long_is_removed(tmp_path, node_cache):
    old = Path(unpack(pack(written(tmp_path / "a", kernel="1", reference=""))).job.kernel.file).parent
    os.utime(old, (0, 0))
    shipment._sweep.cache_clear()
    new = Path(unpack(pack(written(tmp_path / "a", kernel="2", reference=""))).job.kernel.file).parent
    assert (old.exists(), new.exists()) == (False, True)
