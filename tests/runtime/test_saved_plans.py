"""Launch plans in files: a later process replays its first call, and only plans that this installation has made."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import opforge
from opforge.package.pack import _copy_plans, _files_to_copy, pack
from opforge.runtime import enabling, plan_files, saved_plans, signing
from opforge.runtime.plan_files import PlanFile, read_plan_file, write_plan_file
from tests.install.proving import prove
from tests.package.packages import environment, run
from tests.runtime import standin
from tests.runtime.test_launch_plans import ROW, gpu, libcuda, same_bits  # noqa: F401

MARK = "import sys\nsys.kernel_was_loaded = True\n"
SOURCES = {"neg": MARK + standin.KERNELS["neg"], **{op: standin.KERNELS[op] for op in ("mul", "add")}}
FRESH = """
import importlib, json, sys
import torch
runtime, libcuda, policy, directory = sys.argv[1:]
learning, binding = (importlib.import_module(f"{runtime}.{part}") for part in ("learning", "native.binding"))
learning.DEVICE_TYPES.add("cpu")
binding.load().load_driver(libcuda)
made = importlib.import_module(runtime.partition(".")[0]).enable(*[directory] * bool(directory), device="cpu", policy=policy)
right = torch.equal(torch.neg(torch.arange(100.0)), torch.arange(100.0) * -1)
counters = made.counters()["neg.default"]
print(json.dumps([right, counters, "triton" in sys.modules, hasattr(sys, "kernel_was_loaded")]))
"""
REPLAYED = {"kernel": "neg_implementation_1", "served": 1, "aten": {}, "replayed": 1}


@pytest.fixture
def enabled(kernels, gpu):  # noqa: F811
    """Return a function that enables kernels; plans are made on request."""

    def enable(*ops, policy="all", **options):
        root = kernels({op: SOURCES[op] for op in ops})
        return opforge.enable(root, device="cpu", policy=policy, learn="request", **options)

    return enable


@pytest.fixture
def saved(enabled, tmp_path):
    """Return the plan file of a kernel, with a plan for one call, and its folder among the kernels."""
    with enabled("neg") as made:
        torch.neg(torch.arange(100.0))
        assert made.save_plans() == {"neg.default": 1}
    return tmp_path / "kernels" / "neg" / "neg_implementation_1.plans.json"


def first_call(made):
    """Make a call, check its result, and return its counters."""
    assert same_bits(torch.neg(torch.arange(100.0)), torch.arange(100.0) * -1)
    return made.counters()["neg.default"]


def change(path, edit):
    """Change a plan file, and sign it as this installation does."""
    wire = read_plan_file(path).wire()
    edit(wire)
    write_plan_file(path, PlanFile.from_wire(wire), {})


def test_a_fresh_process_replays_its_first_call(saved, libcuda, tmp_path):  # noqa: F811
    """Neither the kernel's file nor Triton is needed for it."""
    prove(tmp_path / "kernels", "neg", {"neg.default": {"float32": ROW}})
    command = [sys.executable, "-c", FRESH, "opforge.runtime", libcuda, "proven", tmp_path / "kernels"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, REPLAYED, False, False]


def test_the_kernel_is_loaded_when_a_call_has_no_plan(saved, enabled, monkeypatch):
    loads = []
    load = enabling.load_function
    monkeypatch.setattr(enabling, "load_function", lambda *given: loads.append(given) or load(*given))
    made = enabled("neg")
    assert first_call(made) == REPLAYED
    assert not loads
    for _ in range(2):
        assert same_bits(torch.neg(torch.arange(50.0)), torch.arange(50.0) * -1)
    assert len(loads) == 1
    assert made.learn()["neg.default"] == {"plans": 2, "refused": {}}


def test_numbers_modes_strides_and_aliases_are_saved(enabled, gpu):  # noqa: F811
    base = torch.arange(600.0)
    calls = [
        lambda: torch.mul(base[:100], 2.0),
        lambda: torch.mul(base[:100], 3.0),
        lambda: torch.mul(base[1:101], 3.0),
        lambda: torch.add(base[:100], base[200:300]),
        lambda: torch.add(base[:100], base[:100]),
        lambda: torch.add(base[:200:2], torch.ones(100)),
        torch.no_grad()(lambda: torch.mul(base[:100], 2.0)),
    ]
    with enabled("mul", "add") as made:
        expected = [call() for call in calls]
        assert made.save_plans() == {"mul.Tensor": 4, "add.Tensor": 3}
    with enabled("mul", "add") as made:
        launches = gpu.library.standin_launches()
        for call, result in zip(calls, expected, strict=True):
            assert same_bits(call(), result)
        assert gpu.library.standin_launches() == launches + len(calls)
        counters = made.counters()
        assert (counters["mul.Tensor"]["replayed"], counters["add.Tensor"]["replayed"]) == (4, 3)
        torch.mul(base[:100], 4.0)
        assert made.save_plans() == {"mul.Tensor": 5, "add.Tensor": 3}  # those that were loaded stay


def test_other_operators_of_a_file_stay_when_it_is_written_again(saved, enabled):
    change(saved, lambda wire: wire["operators"].update({"neg.out": wire["operators"]["neg.default"]}))
    with enabled("neg", ops=["neg.default"]) as made:
        first_call(made)
        made.save_plans()
    assert {op: len(plans.plans) for op, plans in read_plan_file(saved).operators.items()} == {
        "neg.default": 1,
        "neg.out": 1,
    }


def test_compiled_kernels_are_loaded_once_and_when_enabled(saved, enabled, gpu, monkeypatch):  # noqa: F811
    monkeypatch.setattr(saved_plans, "_functions", {})
    before = gpu.library.standin_modules()
    for _ in range(2):
        with enabled("neg"):
            assert gpu.library.standin_modules() == before + 1


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("architecture", "sm_80", "they were made for architecture sm_80, and this is "),
        ("device", "NVIDIA H200", "they were made for device NVIDIA H200, and this is "),
        ("torch", "2.0", "they were made for torch 2.0, and this is "),
        ("triton", "3.0.0", "they were made for triton 3.0.0, and this is "),
        ("abi", 1, "they were made for abi 1, and this is "),
        ("digest", "0" * 16, "the kernel has changed since they were made"),
    ],
)
def test_plans_of_another_origin_are_refused_and_learned_again(saved, enabled, name, value, reason):
    change(saved, lambda wire: wire["origin"].update({name: value}))
    made = enabled("neg")
    (words,) = first_call(made)["plans not loaded"]
    assert words.startswith(f"saved plans are not used: {reason}")
    report = made.learn()["neg.default"]
    assert (report["plans"], list(report["refused"])) == (1, [words])
    assert first_call(made)["replayed"] == 1
    made.save_plans()
    assert read_plan_file(saved).origin == saved_plans.origin_here(read_plan_file(saved).origin.digest, "cpu")


def test_without_triton_plans_are_used(saved, enabled, monkeypatch):
    monkeypatch.setattr(saved_plans, "_triton_version", lambda: "")
    assert first_call(enabled("neg")) == REPLAYED


def edited(text, old, new):
    assert old in text
    return text.replace(old, new)


BITS_OF_MINUS_ONE, BITS_OF_TWO = "3212836864", "1073741824"


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda text: text[:-100], "neg_implementation_1.plans.json is broken"),
        (lambda _text: "[" * 100_000, "neg_implementation_1.plans.json is broken"),
        (lambda text: edited(text, '"opforge_plans": 1', '"opforge_plans": 2'), "is of another format (2)"),
        (lambda text: edited(text, BITS_OF_MINUS_ONE, BITS_OF_TWO), "was not signed by this installation"),
        (lambda text: edited(text, '"signature": "', '"signature": "0'), "was not signed by this installation"),
    ],
)
def test_a_file_that_was_changed_is_not_used(saved, enabled, edit, reason):
    """The author of a kernel may write any file beside it: here a plan that doubles instead of negating."""
    saved.write_text(edit(saved.read_text()))
    (words,) = first_call(enabled("neg"))["plans not loaded"]
    assert reason in words


def test_a_file_signed_elsewhere_is_neither_used_nor_packed(saved, enabled, tmp_path, monkeypatch):
    wire = json.loads(edited(json.dumps(read_plan_file(saved).wire()), BITS_OF_MINUS_ONE, BITS_OF_TWO))
    with monkeypatch.context() as author:
        author.setenv(signing.KEY_VARIABLE, str(tmp_path / "author" / "key"))
        write_plan_file(saved, PlanFile.from_wire(wire), {})
        assert read_plan_file(saved).count == 1
    (words,) = first_call(enabled("neg"))["plans not loaded"]
    assert "was not signed by this installation" in words
    name, words = _copy_plans(saved.with_name("neg_implementation_1.py"), wire["origin"]["digest"], tmp_path / "packed")
    assert words.startswith("launch plans are left out: neg_implementation_1.plans.json was not signed")
    assert (name, (tmp_path / "packed").exists()) == ("", False)
    assert [p.name for p in _files_to_copy(saved.with_name("neg_implementation_1.py"))] == ["neg_implementation_1.py"]


def test_plans_of_one_kernel_are_not_anothers(saved, enabled, tmp_path):
    """They are signed here, and for another source."""
    with enabled("mul") as made:
        torch.mul(torch.arange(100.0), 2.0)
        made.save_plans()
    change(saved.parents[1] / "mul" / "mul_implementation_1.plans.json", lambda wire: wire["operators"].update(
        {"neg.default": wire["operators"]["mul.Tensor"]}
    ))  # fmt: skip
    shutil.copy(tmp_path / "kernels" / "mul" / "mul_implementation_1.plans.json", saved)
    (words,) = first_call(enabled("neg"))["plans not loaded"]
    assert "the kernel has changed" in words


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda cubin: cubin.write_bytes(cubin.read_bytes() + b"\0"), "was changed: its SHA-256 is not its name"),
        (lambda cubin: cubin.unlink(), "No such file"),
        (lambda cubin: (cubin.rename(cubin.with_suffix(".o")), cubin.symlink_to("other")), "links are not followed"),
    ],
)
def test_a_compiled_kernel_that_was_changed_is_not_loaded(saved, enabled, monkeypatch, damage, reason):
    monkeypatch.setattr(saved_plans, "_functions", {})
    (cubin,) = (saved.parent / plan_files.CUBIN_FOLDER).iterdir()
    damage(cubin)
    made = enabled("neg")
    (words,) = first_call(made)["plans not loaded"]
    assert reason in words
    assert made.learn()["neg.default"]["plans"] == 1
    assert first_call(made)["replayed"] == 1


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda row: row["plan"]["steps"][0].update(function=7), "index out of range"),
        (lambda row: row["plan"]["steps"][0].update({"is": "Any"}), "has no part 'Any'"),
        (lambda row: row["plan"]["results"].clear(), "other results than the operator"),
        (lambda row: row["plan"]["steps"][0]["arguments"][0].update(index=9), "an argument is input 9"),
        (lambda row: row["key"].__setitem__(1, 99), "a plan's key ends too early"),
    ],
)
def test_a_plan_that_makes_no_sense_is_not_loaded(saved, enabled, edit, reason):
    change(saved, lambda wire: edit(wire["operators"]["neg.default"]["plans"][0]))
    counters = first_call(enabled("neg"))
    assert reason in next(iter(counters["plans not loaded"]))
    assert "replayed" not in counters


def test_a_driver_that_refuses_a_compiled_kernel_is_no_obstacle(saved, enabled, monkeypatch):
    monkeypatch.setattr(saved_plans, "_functions", {})

    def rename(wire):
        wire["operators"]["neg.default"]["functions"][0]["name"] = "no_such_function"

    change(saved, rename)
    (words,) = first_call(enabled("neg"))["plans not loaded"]
    assert "the CUDA driver refused cuModuleGetFunction with error 500" in words


def test_a_plan_is_not_used_if_one_word_of_its_key_differs(saved, enabled):
    key = read_plan_file(saved).operators["neg.default"].plans[0].key
    for position in range(len(key)):
        if position == 1:  # how many numbers there are
            continue
        for bit in (0, 33):

            def flip(wire, position=position, bit=bit):
                plans = wire["operators"]["neg.default"]["plans"]
                plans[0]["key"] = [*key[:position], key[position] ^ 1 << bit, *key[position + 1 :]]

            change(saved, flip)
            with enabled("neg") as made:
                assert first_call(made)["replayed"] == 0, (position, bit)


def test_proofs_decide_about_saved_plans(saved, enabled, tmp_path):
    prove(
        tmp_path / "kernels", "neg", {"neg.default": {"float32": {**ROW, "numel": [0, 50], "timed": [[0, 50, True]]}}}
    )
    with enabled("neg", policy="proven") as made:
        assert first_call(made) == {
            "kernel": "neg_implementation_1", "served": 0, "aten": {"size not proven": 1}, "replayed": 0,
        }  # fmt: skip


def test_plans_stay_while_other_kernels_come_and_go(saved, enabled, kernels):
    with enabled("neg") as made:
        assert first_call(made)["replayed"] == 1
        torch.neg(torch.arange(50.0))
        made.learn()
        other = kernels({"neg": "def neg_kernel_impl(self):\n    raise NotImplementedError\n"}, folder="other")
        with opforge.enabled(other, device="cpu", policy="all", learn="never"):
            first_call(made)
        assert first_call(made)["replayed"] == 2
        torch.neg(torch.arange(50.0))
        assert made.counters()["neg.default"]["replayed"] == 3  # the one that was learned stays too


def test_threads_replay_saved_plans_while_other_kernels_come_and_go(saved, enabled, kernels):
    other = kernels({"neg": "def neg_kernel_impl(self):\n    raise NotImplementedError\n"}, folder="other")
    made = enabled("neg")
    value, expected = torch.arange(100.0), torch.arange(100.0) * -1
    first_call(made)
    stop, results = threading.Event(), []

    def repeat():
        right = True
        while right and not stop.is_set():
            right = same_bits(torch.neg(value), expected)
        results.append(right)

    threads = [threading.Thread(target=repeat) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            with opforge.enabled(other, device="cpu", policy="all", learn="never", ops=["neg.default"]):
                same_bits(torch.neg(value), expected)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert results == [True] * 4
    before = made.counters()["neg.default"]["replayed"]
    assert first_call(made)["replayed"] == before + 1


def test_with_learn_never_saved_plans_are_not_loaded(saved, kernels, gpu):  # noqa: F811
    with opforge.enabled(kernels({"neg": SOURCES["neg"]}), device="cpu", policy="all", learn="never") as made:
        assert "replayed" not in first_call(made)


def test_operators_that_return_lists_have_no_plans(kernels, gpu):  # noqa: F811
    launch = "scaled[(1,)](t, r, t.numel(), -1.0, BLOCK=64)"
    source = f"def _foreach_neg_kernel_impl(self):\n    made = []\n    for t in self:\n        r = torch.empty_like(t); {launch}; made.append(r)\n    return made\n"
    root = kernels({"_foreach_neg": standin.KERNELS["neg"].partition("def neg_kernel_impl")[0] + source})
    with opforge.enabled(root, device="cpu", policy="all", learn="request") as made:
        for _ in range(2):
            result = torch._foreach_neg([torch.ones(8), torch.ones(4)])
            assert [t.tolist() for t in result] == [[-1.0] * 8, [-1.0] * 4]
            report = made.learn()["_foreach_neg.default"]
        assert report == {
            "plans": 0,
            "refused": {"its results are not one tensor for each that the operator returns": 1},
        }


def test_a_folder_that_cannot_be_written_is_named(saved, enabled):
    with enabled("neg") as made:
        first_call(made)
        saved.unlink()
        saved.mkdir()
        with pytest.raises(RuntimeError, match=r"neg_implementation_1 cannot be saved: .*make it writable"):
            made.save_plans()
    assert not [p.name for p in saved.parent.iterdir() if p.name.startswith(".")]


@pytest.fixture
def package(saved, tmp_path):
    """Return the folder of a package with launch plans."""
    prove(tmp_path / "kernels", "neg", {"neg.default": {"float32": ROW}})
    packed = pack(tmp_path / "kernels", "my_plans", tmp_path / "dist")
    assert packed.kernels[0].planned.startswith("1 launch plans for ")
    (tmp_path / "wheel").symlink_to(packed.wheel)
    return packed.project / "src" / "my_plans"


def enabled_package(package, **options):
    sources = enabling.packed_sources(package)
    return enabling.enable(sources, device="cpu", **{"policy": "proven", "learn": "request", **options})


@pytest.mark.slow
def test_plans_of_a_package_are_used_and_are_its_signers(package, gpu, monkeypatch):  # noqa: F811
    rows = json.loads((package / "kernels.json").read_text())
    (cubin,) = (package / "kernels" / "neg" / "cubins").iterdir()
    assert {"kernels/neg/neg_implementation_1.plans.json", f"kernels/neg/cubins/{cubin.name}"} < set(rows[0]["files"])
    with enabled_package(package) as made:
        assert first_call(made) == REPLAYED
        with pytest.raises(RuntimeError, match="belongs to a package"):
            made.save_plans()
    with monkeypatch.context() as signers:
        signers.setenv(enabling.SIGNERS_VARIABLE, "somebody")
        with enabled_package(package, policy="all") as made:
            assert "who is not among OPFORGE_SIGNERS" in next(iter(first_call(made)["plans not loaded"]))
    monkeypatch.setattr(saved_plans, "architecture", lambda _device: "sm_80")
    with enabled_package(package) as made:
        assert "and this is sm_80" in next(iter(first_call(made)["plans not loaded"]))
        made.learn()
        assert first_call(made)["replayed"] == 1


@pytest.mark.slow
def test_plans_of_a_package_that_was_edited_are_not_used(package, gpu):  # noqa: F811
    for name in ("neg_implementation_1.plans.json", "cubins/*.cubin", "neg_implementation_1.py"):
        (file,) = (package / "kernels" / "neg").glob(name)
        packed = file.read_bytes()
        file.write_bytes(packed.replace(BITS_OF_MINUS_ONE.encode(), BITS_OF_TWO.encode()) + b"\n")
        with enabled_package(package, policy="all") as made:
            (words,) = first_call(made)["plans not loaded"]
            assert words == f"saved plans are not used: {file.name} was changed after packing"
        file.write_bytes(packed)


@pytest.mark.slow
def test_an_installed_package_replays_its_first_call_without_opforge(package, libcuda, tmp_path):  # noqa: F811
    python = environment(tmp_path / "venv", Path(tmp_path / "wheel").resolve())
    printed = run(python, "-c", FRESH, "my_plans._runtime", libcuda, "proven", "", cwd=tmp_path)
    assert json.loads(printed) == [True, REPLAYED, False, False]


def test_a_plan_file_is_what_was_written(saved):
    plans = read_plan_file(saved)
    assert PlanFile.from_wire(copy.deepcopy(plans.wire())) == plans
    (function,) = plans.operators["neg.default"].functions
    assert function.name == "scaled"
    assert (saved.parent / "cubins" / f"{function.cubin}.cubin").read_bytes().startswith(b"\x7fELF")
