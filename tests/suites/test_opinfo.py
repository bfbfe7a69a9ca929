"""The OpInfo suite: recorded from scratch, judged whole against ATen itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opforge.cases import Expect
from opforge.cases.case_files import read_table
from opforge.cases.text import parse_arguments
from opforge.cases.wire import TORCH_DTYPES, decode, json_tree
from opforge.kernels import Kernel
from opforge.kernels.proof import proof_path
from opforge.kernels.source import digest
from opforge.runs.manifest import Manifest
from opforge.runs.proofs import write_proofs
from opforge.runs.rows import ResultRow
from opforge.runtime.operator_schema import schema_of
from opforge.runtime.proof_files import read_proof_file
from opforge.runtime.proven_calls import ProvenCalls
from opforge.suites import SuiteOptions
from opforge.suites.opinfo.case_recorder import CaseRecorder, RecordingMode
from opforge.suites.opinfo.record_cases import record
from opforge.suites.opinfo.suite import OpInfoSuite
from tests.command import opforge
from tests.conftest import slow

DTYPES = ("f32", "bf16", "b8")

FEW = "relu,clamp,where,bitwise_and,topk,gather,native_layer_norm,bmm,linalg_qr,native_dropout,any"
MORE = (
    "tanh,exp,maximum,isinf,sort,cumsum,index_select,_softmax,softmax,linear,convolution,max_pool2d_with_indices,bernoulli,"
    "all,nan_to_num,flip,tril"
)
"""Operators of all kinds."""


@pytest.fixture(scope="module")
def few():
    """Return a suite of the entries that quick tests record."""
    return OpInfoSuite().load(SuiteOptions("cpu", DTYPES))


@pytest.fixture(scope="module")
def every():
    """Return the whole suite: for slow tests alone."""
    return OpInfoSuite().load(SuiteOptions("cpu", DTYPES))


@pytest.fixture(params=["few", slow("every")])
def suite(request):
    return request.getfixturevalue(request.param)


def least(request, few: int, every: int) -> int:
    """Return how many there must be at least in the suite that a test has."""
    return few if request.node.callspec.params["suite"] == "few" else every


def test_every_case_can_be_read_and_its_tree_is_its_text(suite, request):
    checked = 0
    for cases in suite.cases.values():
        for case in cases[:3]:
            parse_arguments(case.args)
            assert json.loads(json_tree(case.args)) == json.loads(case.tree)
            checked += 1
    assert checked > least(request, 900, 2000)


@pytest.mark.slow
def test_reach(every):
    phases: dict[str, set[str]] = {}
    for op, cases in every.cases.items():
        for case in cases:
            phases.setdefault(case.source.rpartition(" ")[2], set()).add(op)
    forward = phases["forward"]
    assert len(forward) >= 500
    assert len(forward | phases["backward"]) >= 600
    assert len(forward | phases["backward"] | phases["variant"]) >= 950
    assert {"matmul.default", "linear.default", "layer_norm.default"} <= phases["composite"]
    assert {"add_.Tensor", "add.out", "relu_.default"} <= phases["variant"]
    assert "_softmax_backward_data.default" in phases["backward"]


class Delivered(Exception):
    """A call as a kernel in Python gets it."""


class Caught(TorchDispatchMode):
    """Catches calls when torch has made of their arguments what the schema says."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise Delivered(func, args, kwargs or {})


def tensor(row):
    """Return a tensor as a row on the wire describes it, of zeros."""
    _, nbytes, dtype, shape, strides, offset, *_ = row
    kind = TORCH_DTYPES[dtype]
    return torch.zeros(-(-nbytes // kind.itemsize) + 1, dtype=kind).as_strided(shape, strides, offset)


def delivered(overload, case):
    """Return the arguments of a case as a kernel in Python gets them; nothing where another operator would get the call, or torch refuses it."""
    tree, named = json.loads(json_tree(case.args))
    args, kwargs = decode(tree, tensor), {name: decode(value, tensor) for name, value in named.items()}
    try:
        with Caught():
            overload(*args, **kwargs)
    except Delivered as caught:
        func, *arguments = caught.args
        return arguments if func is overload else None
    except RuntimeError:  # detach_ of a view
        return None


def test_a_call_is_inside_the_proof_that_its_own_case_makes(suite, request, tmp_path):
    file = tmp_path / "k.py"
    file.write_text("")
    kernel = Kernel("k", "relu.default", (), str(file), (), digest(file))
    about = {"versions": {"torch": torch.__version__}, "machine": {"name": "a CPU"}, "config": {"suite": "opinfo"}}
    about |= {"confinement": {"missing": []}, "plan": {"operators": 1, "missing": [], "optional": []}}
    manifest = Manifest.from_wire(about)
    tried, outside = 0, {}
    for place in range(3):
        cases = {op: found[place] for op, found in suite.cases.items() if len(found) > place}
        rows = [{"kernel": "k", "op": op, "case": c.args, "id": c.id, "verdict": "passed"} for op, c in cases.items()]
        proof_path(file).unlink(missing_ok=True)
        write_proofs([kernel], map(ResultRow.from_wire, rows), manifest, ())
        for op, proven in read_proof_file(proof_path(file))["operators"].items():
            known = schema_of(op)
            base, _, overload = op.partition(".")
            call = (
                delivered(getattr(getattr(torch.ops.aten, base), overload), cases[op]) if not known.composite else None
            )
            if call is not None:
                tried += 1
                if reason := ProvenCalls(known, proven, check_speed=False).why_not(*call):
                    outside[op] = (cases[op].args, reason)
    assert outside == {}
    assert tried > least(request, 800, 2500)


def test_signatures_are_kept_once(suite):
    import re

    for op in ("mul.Tensor", "view.default", "add.out"):
        plain = Counter((case.blob, case.expect, re.sub(r", at=\d+", "", case.args)) for case in suite.cases[op])
        assert max(plain.values()) == 1


def test_contents_of_out_tensors_do_not_depend_on_the_memory_they_got():
    a, b, found = torch.ones(2, 2), torch.ones(2, 2), []
    for garbage in (1.0, 2.0):
        calls = []
        with RecordingMode(CaseRecorder(calls.append, "cpu")):
            torch.mm(a, b, out=torch.full((8,), garbage)[:4].view(2, 2))
            torch.mul(a[:, :1], b[:, :1], out=a[:, 1:])  # an input lies in the same storage: its contents count
        found.append({call.op: call.storages for call in calls if call.phase == "forward"})
    assert found[0]["mm.out"] == found[1]["mm.out"]
    assert found[0]["mm.out"][2] == torch.full((8,), 7.0).numpy().tobytes()
    assert found[0]["mul.out"][0] == found[0]["mul.out"][2] == torch.ones(4).numpy().tobytes()


def test_wrong_inputs_are_cases(suite, request):
    raising = [case for cases in suite.cases.values() for case in cases if case.expect is Expect.RAISES]
    assert len(raising) > least(request, 50, 100)


def test_what_was_lost_is_said(suite):
    assert any("sparse" in loss for loss in suite.losses)
    assert any("Jiterator" in loss for loss in suite.losses)


def test_a_selection_reads_only_its_operators():
    loaded = OpInfoSuite().load(SuiteOptions("cpu", ("b8",), frozenset({"bitwise_and.Tensor"})))
    assert set(loaded.cases) == {"bitwise_and.Tensor"}


@pytest.mark.parametrize(("ops", "overloads"), [(FEW, 20), slow(MORE, 30)])
def test_aten_passes_all_of_a_selection(tmp_path, ops, overloads):
    """The whole suite takes minutes, and its figures stand in docs/suites.md."""
    words = ("--ops", ops, "--dtypes", "bool,bf16", "--out", str(tmp_path / "run"), "--format", "json")
    done = opforge("run", "--suite", "opinfo", "--backend", "aten", *words)
    failed = json.loads((tmp_path / "run" / "failed_tests.json").read_text())
    assert failed == []
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["scores"]["operators"] > overloads


def test_the_command_of_the_known_names_with_two_operators(tmp_path):
    words = [
        "--suite",
        "opinfo",
        "--backend",
        "aten",
        "--ops",
        "add,sub",
        "--dtypes",
        "bool,bf16",
        "--out",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "BackendBench.scripts.main", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for op in ("add.Tensor", "add_.Tensor", "add.out", "sub.Tensor"):
        assert op in done.stdout


def test_coverage_is_printed():
    out = opforge("ls", "ops", "--suite", "opinfo", "--dtypes", "bool,bf16").stdout
    assert "overloads forward, as dispatched" in out
    assert "with in-place and out variants" in out
    assert "lost:" in out


@pytest.mark.slow
def test_entries_that_there_are_not_are_named(tmp_path):
    done = opforge("ls", "ops", "--suite", "opinfo", OPFORGE_OPINFO_ENTRIES="abs,abss", OPFORGE_CACHE=str(tmp_path))
    assert done.returncode == 2
    assert "OPFORGE_OPINFO_ENTRIES names unknown entries of OpInfo: abss; allowed are names such as add" in done.stderr
    assert not list(tmp_path.glob("opinfo/*/cpu/f32"))


CRASHING = """
import ctypes, sys, torch
from opforge.procs.child import open_messages
from opforge.suites.opinfo import child, entries
from opforge.suites.opinfo.case_recorder import RecordingMode

class Entry:
    def __init__(self, name): self.formatted_name = name

def samples(entry, device, dtype, recorder):
    with RecordingMode(recorder):
        torch.relu(torch.ones(len(entry.formatted_name)))
    if entry.formatted_name == "crash":
        ctypes.string_at(0)
    with RecordingMode(recorder):
        torch.abs(torch.ones(len(entry.formatted_name)))

entries.all_entries = lambda: [Entry(n) for n in ("one", "crash", "four", *{"a", "b", "c", "d", "e", "f", "g", "h"})]
entries.record_samples = samples
pipe = open_messages()
child.run(sys.argv[1], sys.argv[2], int(sys.argv[3]), pipe)
"""


@pytest.mark.slow
def test_a_native_crash_while_recording_loses_one_entry_and_says_so(tmp_path, monkeypatch):
    monkeypatch.delenv("OPFORGE_OPINFO_ENTRIES", raising=False)
    script = tmp_path / "child.py"
    script.write_text(CRASHING)
    record("cpu", "f32", tmp_path, lambda *_: None, command=(sys.executable, str(script)))
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert losses == [["crash: recording died of SIGSEGV (signal 11); cases of this entry are lost", 1]]
    recorded = {(case.op, case.source) for case in read_table(tmp_path / "cases.parquet")}
    for name in ("one", "four"):
        assert {("relu.default", f"{name} forward"), ("abs.default", f"{name} forward")} <= recorded
    code = "print(*{'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'})"
    hashed = subprocess.run([sys.executable, "-c", code], stdout=-1, text=True, env={"PYTHONHASHSEED": "0"}, check=True)
    first = hashed.stdout.split()[0]
    assert ("relu.default", f"{first} forward") in recorded, "sets have the same order in every recording"


@pytest.mark.slow
def test_two_processes_that_start_at_once_record_once(tmp_path, monkeypatch):
    """Both wait for one recording, of a few entries, and read the same folder."""
    monkeypatch.delenv("OPFORGE_OPINFO_ENTRIES", raising=False)
    script = tmp_path / "child.py"
    script.write_text(CRASHING.replace('"crash", ', ""))
    code = (
        "import sys\n"
        "import opforge.suites.opinfo.suite as s; from opforge.suites.opinfo.record_cases import record\n"
        "made = []\n"
        "def count(device, slot, draft):\n"
        "    made.append(1)\n"
        "    yield 0, 1, 'begun'\n"
        f"    record(device, slot, draft, lambda *_: None, command=(sys.executable, {str(script)!r}))\n"
        "s._record_in_process = count\n"
        "folder = s.slot_folder('cpu', 'f32')\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "list(s._record_once('cpu', 'f32', folder))\n"
        "print(len(made), (folder / 'losses.json').exists())\n"
    )
    environment = {**os.environ, "OPFORGE_CACHE": str(tmp_path / "cache")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    both = [subprocess.Popen([sys.executable, "-c", code], **pipes) for _ in range(2)]
    assert [p.stdout.readline() for p in both] == ["ready\n"] * 2
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    assert sorted(p.communicate()[0].strip() for p in both) == ["0 True", "1 True"]
    (folder,) = (tmp_path / "cache").glob("opinfo/*/cpu/f32")
    assert {p.name for p in folder.iterdir()} == {"cases.parquet", "tensors.safetensors", "losses.json"}
