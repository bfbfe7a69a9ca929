"""What a run proves of a kernel, and that `enable` serves just that."""

from __future__ import annotations

import errno
import io
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from filelock import FileLock
from rich.console import Console

import opforge
from opforge.cases.case import case_id
from opforge.cli.main import call
from opforge.kernels import Kernel
from opforge.kernels.proof import proof_path
from opforge.kernels.source import UNREADABLE, digest
from opforge.ops import table
from opforge.reports.terminal import print_run
from opforge.runs.execute.local import ThisMachine
from opforge.runs.manifest import Machine, Manifest
from opforge.runs.proofs import not_slower, timed_ranges, write_proofs
from opforge.runs.rows import ResultRow
from opforge.runtime.devices import cpu_name
from opforge.runtime.dispatch import KernelWarning
from opforge.runtime.proof_files import read_proof_file

RELU = """
import torch
def relu_kernel_impl(self):
    if self.dtype == torch.float64:
        return self  # wrong where there is something below zero
    return torch.where(self > 0, self, torch.where(self.isnan(), self, 0)).to(self.dtype)
"""


@pytest.fixture
def folder(tmp_path):
    file = tmp_path / "kernels" / "relu" / "relu_implementation_1.py"
    file.parent.mkdir(parents=True)
    file.write_text(RELU)
    return file


@pytest.fixture
def judge(folder, judge_tiny):
    """Return a function that judges the kernel on one case."""

    def judge(case):
        ended = judge_tiny(folder.parents[1], {"relu.default": [case]})
        shutil.rmtree(ended.store.path)

    return judge


MANIFEST = Manifest.from_wire(
    {
        "versions": {"torch": "2.13.0"},
        "machine": {"name": "a CPU"},
        "config": {"suite": "tiny"},
        "plan": {"operators": 1, "missing": [], "optional": []},
        "confinement": {"missing": []},
    }
)


def passed(case, verdict="passed", op="relu.default", **fields):
    """Return the row of a case; its id is made of what it asks."""
    head = {"kernel": "k", "op": op, "case": case, "id": case_id(op, case, "", "returns", "correctness")}
    return ResultRow.from_wire({**head, "verdict": verdict, **fields})


def prove(file, *rows, name="k", manifest=MANIFEST, **options):
    """Write the proof of a kernel from rows of a run."""
    kernel = Kernel(name, "relu.default", (), str(file), (), digest(file))
    return write_proofs([kernel], rows, manifest, (), **options)


def proof(file):
    return json.loads(proof_path(file).read_text())


def test_sizes_speak_for_those_that_are_nearer_to_them_than_to_others():
    assert timed_ranges([(100, True)]) == [[50, 200, True]]
    assert timed_ranges([(100, True), (10_000, True)]) == [[50, 20_000, True]]
    assert timed_ranges([(100, False), (10_000, True)]) == [[50, 1000, False], [1001, 20_000, True]]
    assert timed_ranges([(100, True), (100, False)]) == [[50, 200, False]]
    assert timed_ranges([]) == []


@pytest.mark.parametrize(
    ("device", "call", "good"),
    [(1.2, 1.1, True), (1.2, 0.6, False), (0.9, 1.1, False), (1.0, 1.0, True), (1.2, None, True)],
)
def test_on_a_gpu_a_kernel_that_is_launched_slowly_is_slower(device, call, good):
    headline = {"speedup": 1.0, "speedup_low": 0.5, "speedup_high": device}
    calls = {} if call is None else {"call": {"speedup": 1.0, "low": 0.5, "high": call}}
    assert not_slower(passed("", **headline, **calls)) is good


def test_a_run_proves_what_passed_and_enable_serves_it(folder, judge):
    judge("((T([3, 4], f32),), {})")
    found = proof(folder)
    assert found["operators"]["relu.default"]["float32"]["numel"][1] == 17 * 4099
    assert found["operators"]["relu.default"]["float32"]["extents"] == [[[4, 4099], [0, 16640]]]
    assert found["operators"]["relu.default"]["float32"]["rank"][1] == 2
    assert "contiguous" in found["operators"]["relu.default"]["float32"]["layouts"]
    with opforge.enabled(folder.parents[1], device="cpu", policy="right") as made:
        torch.relu(torch.ones(3, 4))
        torch.relu(torch.ones(3, 4, dtype=torch.float64))
        torch.relu(torch.ones(3, 40_000))
        torch.relu(torch.ones(3, 5_000))
        assert made.counters()["relu.default"]["served"] == 1
        refused = {"dtypes not proven": 1, "size not proven": 1, "extent not proven": 1}
        assert made.counters()["relu.default"]["aten"] == refused
    nowhere = pytest.warns(KernelWarning, match="no kernel is enabled")
    with nowhere, opforge.enabled(folder.parents[1], device="cpu") as made:
        assert made.counters() == {}  # and not asked in vain, call by call
        assert made.refused["relu.default"].startswith(
            "relu_implementation_1 was not timed for relu.default, or is slower"
        )


def test_extents_are_kept_by_argument_and_dimension_and_widened(folder):
    prove(folder, passed("((T([3, 4], f32),), {})", variants=["empty"]), passed("((T([50], f32),), {})"))
    assert proof(folder)["operators"]["relu.default"]["float32"]["extents"] == [[[4, 50], [0, 3]]]
    prove(folder, passed("((T([2, 7, 1], f32),), {})"))
    assert proof(folder)["operators"]["relu.default"]["float32"]["extents"] == [[[1, 50], [0, 7], [2, 2]]]
    cat = passed("(([T([2, 3], f32), T([5, 3], f32)],), {})", op="cat.default")
    where = passed("((T([2, 1], b8), T([3], f32), T([], f32)), {})", op="where.self")
    prove(folder, cat, where)
    found = proof(folder)["operators"]
    assert found["cat.default"]["[float32]*2"]["extents"] == [[[3, 3], [2, 5]]]
    assert found["where.self"]["bool,float32,float32"]["extents"] == [[[1, 1], [2, 2]], [[3, 3]], []]


def test_a_second_run_widens_a_proof_and_a_failure_takes_its_dtypes_away(folder, judge):
    judge("((T([3, 4], f32),), {})")
    judge("((T([50], f32),), {})")
    assert proof(folder)["operators"]["relu.default"]["float32"]["extents"] == [[[0, (1 << 16) + 4099], [0, 16640]]]
    judge("((T([50], f64),), {})")
    assert list(proof(folder)["operators"]["relu.default"]) == ["float32"]
    folder.write_text(RELU.replace("self > 0, self", "self > 0, 2 * self"))
    judge("((T([50], f32),), {})")
    assert proof(folder)["operators"] == {}
    assert list(proof(folder)["failed"]["relu.default"]) == ["float32"]


@pytest.mark.parametrize(
    "before",
    [
        "[" * 200_000,
        {"operators": None},
        {"operators": {"relu.default": {"float32": {"rank": 5}}}},
        {"suites": 3},
        {"opforge_proof": 1},
    ],
    ids=lambda b: str(b)[:40],
)
def test_a_proof_that_is_broken_or_of_another_format_is_replaced(folder, before):
    prove(folder, passed("((T([3, 4], f32),), {})"))
    if isinstance(before, dict):
        before = json.dumps({**proof(folder), **before})
    proof_path(folder).write_text(before)
    prove(folder, passed("((T([50], f32),), {})"))
    assert proof(folder)["operators"]["relu.default"]["float32"]["numel"] == [50, 50]


F32, MORE, F64 = "((T([3, 4], f32),), {})", "((T([50], f32),), {})", "((T([5], f64),), {})"


def proven(file):
    return {op: list(rows) for op, rows in proof(file)["operators"].items()}


@pytest.mark.parametrize("verdict", ["wrong", "contract", "error"])
def test_a_smaller_run_does_not_prove_what_a_larger_one_found_wrong(folder, verdict):
    wrong = passed(MORE, verdict)
    prove(folder, passed(F32), wrong, passed(F64))
    for _ in range(2):
        assert proven(folder) == {"relu.default": ["float64"]}
        assert proof(folder)["failed"] == {"relu.default": {"float32": {"cases": {wrong.id: verdict}, "more": {}}}}
        prove(folder, passed(F32), passed(MORE, "unsupported"))
    prove(folder, passed(MORE))
    assert proven(folder) == {"relu.default": ["float64", "float32"]}
    assert "failed" not in proof(folder)


@pytest.mark.parametrize("verdict", ["cheated", "crashed", "timed_out"])
def test_nothing_is_proven_while_a_case_is_left_that_cheated_crashed_or_hung(folder, verdict):
    prove(folder, passed(F64))
    prove(folder, passed(F32), passed(MORE, verdict, op="relu_.default"))
    assert proven(folder) == {}
    prove(folder, passed(F32))
    assert proven(folder) == {}
    words = f"is not proven: 1 case failed, for example [0-9a-f]{{16}}: {verdict}; fix it"
    here = replace(MANIFEST, versions={"torch": torch.__version__}, machine=Machine(name=cpu_name()))
    prove(folder, passed(MORE, verdict), manifest=here)
    with pytest.warns(KernelWarning, match=words), opforge.enabled(folder.parents[1], device="cpu") as made:
        assert made.operators == []
    assert call(["ls", "kernels", "--ops-directory", str(folder.parents[1])]) == 0
    prove(folder, passed(MORE), passed(F32), manifest=here)
    assert proven(folder) == {"relu.default": ["float32"]}


def test_another_source_another_device_and_another_torch_begin_anew(folder):
    prove(folder, passed(F32, "crashed"))
    prove(folder, passed(MORE), manifest=replace(MANIFEST, machine=Machine(name="a GPU")))
    assert proven(folder) == {"relu.default": ["float32"]}
    prove(folder, passed(F32, "crashed"), manifest=replace(MANIFEST, machine=Machine(name="a GPU")))
    folder.write_text(RELU + "\n")
    prove(folder, passed(MORE))
    assert proven(folder) == {"relu.default": ["float32"]}


def test_of_many_failures_some_are_named_and_the_rest_is_counted_for_good(folder):
    cases = [f"((T([{n}], f32),), {{}})" for n in range(1, 101)]
    for _ in range(2):  # which does not count twice what it does not know by name
        prove(folder, *(passed(case, "crashed" if n == 99 else "wrong") for n, case in enumerate(cases)))
        row = proof(folder)["failed"]["relu.default"]["float32"]
        assert len(row["cases"]) == 64
        assert row["more"] == {"wrong": 36}
        assert next(iter(row["cases"].values())) == "crashed"  # the gravest are named
    prove(folder, *map(passed, cases), passed(F64))
    assert proof(folder)["failed"]["relu.default"]["float32"] == {"cases": {}, "more": {"wrong": 36}}
    assert proven(folder) == {"relu.default": ["float64"]}


def test_a_kernel_that_could_not_be_loaded_is_proven_once_it_can(folder):
    cases = [f"((T([{n}], f32),), {{}})" for n in range(1, 101)]
    prove(folder, *(passed(case, "error") for case in cases))
    assert proven(folder) == {}
    prove(folder, *map(passed, cases))
    assert proven(folder) == {"relu.default": ["float32"]}


def test_a_run_that_is_broken_off_keeps_what_failed_and_widens_nothing(folder):
    prove(folder, passed(F32), passed(F64))
    before = proof(folder)
    prove(folder, passed(MORE), finished=False)
    assert proof(folder) == before
    other = "((T([6], f64),), {})"
    prove(folder, passed(MORE), passed(other, "wrong"), finished=False)
    assert proof(folder)["operators"] == {"relu.default": {"float32": before["operators"]["relu.default"]["float32"]}}
    prove(folder, passed(other), passed(F32, "wrong"), finished=False)
    assert list(proof(folder)["failed"]["relu.default"]) == ["float32", "float64"]


def test_an_interrupt_keeps_what_failed(folder, judge_tiny, monkeypatch):
    execute = ThisMachine.execute

    def interrupted(executor, work):
        execute(executor, work)
        raise KeyboardInterrupt

    monkeypatch.setattr(ThisMachine, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        judge_tiny(folder.parents[1], {"relu.default": [F64]})
    assert list(proof(folder)["failed"]["relu.default"]) == ["float64"]
    assert proven(folder) == {}


def test_one_proof_that_cannot_be_written_stops_no_other(folder, judge_tiny, kernel_directory):
    root = kernel_directory(
        {"abs": "import torch\ndef abs_kernel_impl(self):\n    return torch.where(self > 0, self, 0 - self)\n"}
    )
    proof_path(folder).mkdir()
    ended = judge_tiny(root, {"relu.default": [F32], "abs.default": [F32]})
    assert proven(root / "abs" / "abs_implementation_1.py") == {"abs.default": ["float32"]}
    assert [p.name for p in folder.parent.iterdir() if p != folder] == [proof_path(folder).name]
    remark = ended.manifest.proofs.remarks["relu_implementation_1"]
    assert remark == f"{proof_path(folder)} cannot be written: Is a directory"
    console = Console(width=400, file=io.StringIO())
    print_run(console, ended.manifest, ended.summary)
    assert f"note {remark}" in console.file.getvalue()


def test_a_proof_that_no_longer_holds_is_taken_away_where_nothing_can_be_written(folder, monkeypatch):
    prove(folder, passed(F32))
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("opforge.cache.write_atomically", Mock(side_effect=full))
    assert prove(folder, passed(MORE)).remarks == {
        "k": f"{proof_path(folder)} cannot be written: No space left on device"
    }
    assert proven(folder) == {"relu.default": ["float32"]}
    prove(folder, passed(F32, "wrong"))
    assert not proof_path(folder).exists()


def test_two_runs_at_once_prove_both(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("OPFORGE_CACHE", str(tmp_path / "cache"))

    def slow(path):
        found = read_proof_file(path)
        time.sleep(0.3)
        return found

    table()  # made again in another cache, before threads want it
    monkeypatch.setattr("opforge.runs.proofs.read_proof_file", slow)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda case: prove(folder, passed(case)), (F32, F64)))
    assert sorted(proven(folder)["relu.default"]) == ["float32", "float64"]
    assert {p.name for p in folder.parent.iterdir()} == {folder.name, proof_path(folder).name}
    monkeypatch.setattr("opforge.runs.proofs._PATIENCE_S", 0.1)
    (lock,) = (tmp_path / "cache" / "locks").iterdir()
    with FileLock(lock):
        assert "could not be acquired" in prove(folder, passed(F32)).remarks["k"]


def test_a_source_that_was_edited_while_it_was_judged_is_not_proven(folder, judge_tiny, monkeypatch):
    def edited(*given, **options):
        folder.write_text(RELU + "\n# other\n")
        return write_proofs(*given, **options)

    monkeypatch.setattr("opforge.runs.pipeline.write_proofs", edited)
    ended = judge_tiny(folder.parents[1], {"relu.default": [F32]})
    assert not proof_path(folder).exists()
    assert ended.manifest.proofs.written == ()
    assert ended.manifest.proofs.remarks == {
        "relu_implementation_1": f"{folder} was changed while it was judged, so no proof is written; judge it again with `opforge run`"
    }


@pytest.mark.parametrize(
    ("op", "cases", "arguments"),
    [
        ("gelu.default", ["((T([3], f32),), {})"], None),
        ("gelu.default", ["((T([3], f32),), {'approximate': 'tanh'})"], {"approximate": {"'tanh'": []}}),
        (
            "gelu.default",
            ["((T([3], f32),), {'approximate': 'tanh'})", "((T([3], f32),), {})"],
            {"approximate": {"'tanh'": [], "default": []}},
        ),
        (
            "_softmax.default",
            ["((T([3, 4], f32), 1, False), {})", "((T([3, 4], f32), -1, False), {})"],
            {"dim": {"int": [-1, 1]}, "half_to_float": {"False": []}},
        ),
        ("elu.default", ["((T([3], f32), 2, 1.5), {})"], {"alpha": {"int": [2, 2]}, "scale": {"float": [1.5, 1.5]}}),
        ("avg_pool2d.default", ["((T([1, 4, 4], f32), 2), {})"], {"kernel_size": {"[int]*2": [2, 2]}}),
        (
            "native_layer_norm.default",
            ["((T([2, 4], f32), [4], None, None, 1), {})"],
            {"normalized_shape": {"[int]*1": [4, 4]}, "eps": {"float": [1.0, 1.0]}},
        ),
        (
            "histogram.bin_ct",
            ["((T([9], f32), 5), {'range': [0, 1]})"],
            {"bins": {"int": [5, 5]}, "range": {"[float]*2": [0.0, 1.0]}},
        ),
        (
            "native_layer_norm.default",
            [f"((T([2, 4], f32), [4], None, None, 1{'0' * 400}), {{}})"],
            {"normalized_shape": {"[int]*1": [4, 4]}, "eps": {"int": [10**400, 10**400]}},
        ),
        (
            "_to_copy.default",
            ["((T([3], f32),), {'dtype': bf16, 'device': device('cpu')})"],
            {"dtype": {"bfloat16": []}},
        ),
    ],
)
def test_arguments_that_are_no_tensors_are_part_of_a_proof(folder, op, cases, arguments):
    prove(folder, *(passed(case, op=op) for case in cases))
    whole = proof(folder)
    ((_, row),) = whole["operators"][op].items()
    assert row.get("arguments") == arguments
    proof_path(folder).unlink()
    for case in cases:  # one run after another proves the same
        prove(folder, passed(case, op=op))
    assert proof(folder) == whole
    assert read_proof_file(proof_path(folder))["operators"] == whole["operators"]


@pytest.mark.parametrize(
    "words",
    [{"int": [2, 1]}, {"int": [1]}, {"int": ["1", "2"]}, {"int": [True, True]}, {"int": 1}, {"a\nb": []}, [], 3],
)
def test_a_proof_whose_arguments_are_broken_is_none(folder, words):
    prove(folder, passed("((T([3], f32),), {'approximate': 'tanh'})", op="gelu.default"))
    found = proof(folder)
    found["operators"]["gelu.default"]["float32"]["arguments"] = {"approximate": words}
    proof_path(folder).write_text(json.dumps(found))
    assert "is broken" in read_proof_file(proof_path(folder))


@pytest.mark.parametrize("arguments", [[], 0, "", False, None])
def test_a_proof_with_anything_for_arguments_is_none(folder, arguments):
    prove(folder, passed("((T([3], f32),), {})"))
    found = proof(folder)
    found["operators"]["relu.default"]["float32"]["arguments"] = arguments
    proof_path(folder).write_text(json.dumps(found))
    assert "is broken" in read_proof_file(proof_path(folder))


def test_a_call_without_a_tensor_proves_nothing(folder):
    prove(folder, passed("((3, 4), {})", op="tril_indices.default"))
    assert not proof_path(folder).exists()


@pytest.mark.parametrize(
    ("case", "op", "signature", "differ"),
    [
        ("((T([3, 4], f32), T([3, 4], f32)), {})", "add.Tensor", "float32,float32", False),
        ("((T([3, 4], f32), T([4], f32)), {})", "add.Tensor", "float32,float32", True),
        ("((T([3, 4], f32), 2), {})", "add.Tensor", "float32,number(int)", False),
        ("(([T([2], f32)],), {})", "cat.default", "[float32]*1", False),
        ("(([T([2], f32), T([3], f32)],), {})", "cat.default", "[float32]*2", True),
        ("(([T([2], f32), T([2], f64), T([2], f32), T([2], f32)],), {})", "cat.default", "[float32 float64]*n", False),
    ],
)
def test_shapes_that_differ_and_how_many_are_in_a_list_are_part_of_a_proof(folder, case, op, signature, differ):
    prove(folder, passed(case, op=op))
    ((found, row),) = proof(folder)["operators"][op].items()
    assert found == signature
    assert ("shapes differ" in row["layouts"]) == differ


def test_nothing_is_proven_of_a_kernel_without_a_digest(folder):
    kernel = Kernel("k", "relu.default", (), str(folder.with_name("gone.py")), (), UNREADABLE)
    assert write_proofs([kernel], [passed(F32)], MANIFEST, ()).paths == []
    assert not proof_path(folder.with_name("gone.py")).exists()


def test_a_proof_made_by_hand_is_not_widened(folder):
    prove(folder, passed("((T([3, 4], f32),), {})"))
    found = proof(folder)
    found["operators"]["relu.default"]["float32"]["numel"] = [0, 10**12]
    proof_path(folder).write_text(json.dumps(found))
    prove(folder, passed("((T([50], f32),), {})"))
    assert proof(folder)["operators"]["relu.default"]["float32"]["numel"] == [50, 50]


def test_where_kernels_can_read_the_key_nothing_is_proven(folder):
    shut_off = replace(MANIFEST, confinement={"missing": ["files outside its folder"]})
    done = prove(folder, passed(F32), manifest=shut_off)
    assert not proof_path(folder).exists()
    assert "kernels could read the key that signs proofs" in done.remarks["k"]
    prove(folder, passed(F32))
    prove(folder, passed(F32, "wrong"), manifest=shut_off)
    assert not proof_path(folder).exists(), "what failed there voids what was proven before"
