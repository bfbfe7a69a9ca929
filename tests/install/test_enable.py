"""`opforge.enable`: proven calls are served, the rest is ATen's, faults end in ATen, and taking out restores PyTorch exactly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import warnings

import pytest
import torch

import opforge
from opforge.errors import OpforgeError, UnknownNameError
from opforge.kernels.proof import proof_path
from opforge.kernels.source import UNREADABLE
from opforge.ops import table
from opforge.runtime.aten_kernels import dispatcher_dump
from opforge.runtime.dispatch import KernelWarning
from tests.install.proving import ADD, RELU, marked, prove

ANY = {"rank": [0, 4], "numel": [0, 1000], "layouts": ["contiguous"], "timed": [[1, 1000, True]]}


def dumps():
    return {op.name: dispatcher_dump(op) for op in table()}


def overridden():
    return {name for name in torch.library._impls if name.startswith("aten/")}


def test_a_family_is_served_by_one_kernel_and_taken_out_exactly(kernels):
    before, known = dumps(), overridden()
    x = torch.tensor([-1.0, 2.0])
    made = opforge.enable(kernels({"relu": RELU, "add": ADD}), device="cpu", policy="all")
    assert marked(torch.relu(x))
    assert marked(torch.relu_(x.clone()))
    out = torch.empty(2)
    torch.add(x, x, out=out)
    assert marked(out)
    assert marked(x + 1)
    counters = made.counters()
    assert counters["relu.default"] == {"kernel": "relu_implementation_1", "served": 1, "aten": {}}
    assert counters["relu_.default"]["served"] == 1
    assert counters["add.out"]["served"] == 1
    opforge.disable()
    assert not marked(torch.relu(x))
    assert dumps() == before
    assert overridden() == known
    made.disable()  # a second time nothing happens


def test_only_what_is_proven_is_served_and_the_rest_says_why(kernels):
    root = kernels({"relu": RELU})
    few = {**ANY, "rank": [1, 2], "numel": [1, 100], "layouts": ["contiguous", "transposed"]}
    prove(root, "relu", {"relu.default": {"float32": {**few, "timed": [[1, 20, True], [21, 50, False]]}}})
    with opforge.enabled(root, device="cpu") as made:
        assert marked(torch.relu(torch.ones(4)))
        assert marked(torch.relu(torch.ones(4, 5).t()))
        outside = {
            "dtypes not proven": torch.ones(4, dtype=torch.float64),
            "number of dimensions not proven": torch.ones(1, 2, 2),
            "size not proven": torch.ones(101),
            "layout not proven": torch.ones(8)[::2],
            "slower than ATen at this size": torch.ones(30),
            "not timed at this size": torch.ones(60),
        }
        for tensor in outside.values():
            assert not marked(torch.relu(tensor))
        assert not marked(torch.relu_(torch.ones(4)))
        assert made.counters() == {
            "relu.default": {
                "kernel": "relu_implementation_1", "served": 2, "aten": dict.fromkeys(outside, 1),
            }
        }  # fmt: skip
        assert made.refused["relu_.default"] == "relu_implementation_1 is not proven for relu_.default"
    with opforge.enabled(root, device="cpu", policy="right"):
        assert marked(torch.relu(torch.ones(30)))
        assert not marked(torch.relu(torch.ones(101)))


@pytest.mark.parametrize("pair", [("float32", "float32"), ("float32", "number(int)")])
def test_signatures_of_two(kernels, pair):
    root = kernels({"add": ADD})
    prove(root, "add", {"add.Tensor": {",".join(pair): ANY}})
    with opforge.enabled(root, device="cpu") as made:
        x = torch.ones(3)
        assert marked(x + x) == (pair[1] == "float32")
        assert marked(x + 1) == (pair[1] == "number(int)")
        assert not marked(x + x.double())
        assert not marked(x + torch.ones(6)[::2])
        assert made.counters()["add.Tensor"]["served"] >= 1


@pytest.mark.parametrize("more", [[], ["shapes differ"]])
def test_tensors_of_different_shapes_are_inside_where_such_were_judged(kernels, more):
    root = kernels({"add": ADD})
    prove(root, "add", {"add.Tensor": {"float32,float32": {**ANY, "layouts": ["contiguous", *more]}}})
    with opforge.enabled(root, device="cpu") as made:
        x = torch.ones(3, 3)
        for _ in range(3):  # the first is asked in full, the others are known by their geometry
            assert marked(x + x)
            assert marked(x + torch.ones(3)) == bool(more)
            assert marked(x + torch.ones(())) == bool(more)
            assert marked(x + torch.ones(1, 3)) == bool(more)
        assert made.counters()["add.Tensor"]["aten"] == ({} if more else {"shapes that differ not proven": 9})


CAT = "import torch\ndef cat_kernel_impl(tensors, dim=0):\n    return torch.cat(tuple(tensors), dim) + MARK\n"


@pytest.mark.parametrize(("word", "served"), [("1", {1}), ("2", {2}), ("n", {3, 4, 7})])
def test_lists_of_one_two_and_more_are_proven_apart(kernels, word, served):
    root = kernels({"cat": CAT})
    prove(root, "cat", {"cat.default": {f"[float32]*{word}": ANY}})
    with opforge.enabled(root, device="cpu"):
        assert {n for n in (1, 2, 3, 4, 7) if marked(torch.cat([torch.ones(2)] * n))} == served
        assert not marked(torch.cat([torch.ones(2), torch.ones(2).double()]))


def test_a_proof_that_does_not_hold_here_is_void_and_says_why(kernels):
    x = torch.ones(3)
    for changes, words in {
        ("digest", "0" * 16): "has changed since it was proven",
        ("torch", "2.1.0"): "was proven with torch 2.1.0",
        ("device", "Another CPU"): "was proven on Another CPU",
    }.items():
        root = kernels({"relu": RELU})
        prove(root, "relu", {"relu.default": {"float32": ANY}}, **dict([changes]))
        with pytest.warns(KernelWarning, match=words):
            made = opforge.enable(root, device="cpu")
        assert not marked(torch.relu(x))
        assert words in made.refused["relu.default"]
        assert made.operators == []
        made.disable()
    root = kernels({"relu": RELU})
    proof_path(root / "relu" / "relu_implementation_1.py").write_text("{")
    with pytest.warns(KernelWarning, match="is broken"), opforge.enabled(root, device="cpu") as made:
        assert "is broken; judge the kernel again with `opforge run`" in made.refused["relu.default"]


BROKEN = [
    {"operators": None}, {"operators": []}, {"operators": {"relu.default": []}}, {"operators": {"relu.default": {"float32": 1}}},
    {"operators": {"relu.default": {"float32": {"rank": 5}}}}, {"operators": {"relu.default": {"float32": {**ANY, "rank": [1, True]}}}},
    {"operators": {"relu.default": {"float32": {**ANY, "numel": [5, 1]}}}}, {"operators": {"relu.default": {"float32": {**ANY, "layouts": "contiguous"}}}},
    {"operators": {"relu.default": {"float32": {**ANY, "timed": [[1, 2]]}}}}, {"operators": {"relu.default": {"float32": {**ANY, "timed": [[1, 2, 1]]}}}},
    {"operators": {"relu.default": {"float32": ANY}}}, {"operators": {"relu.default": {"float32": {**ANY, "extents": [[[5, 1]]]}}}},
    {"digest": None}, {"torch": 3}, {"device": 3}, {"suites": None}, {"suites": "here"}, {"opforge_proof": "2"}, {"opforge_proof": None},
]  # fmt: skip
"""Changes of a proof; what is None is left out."""


@pytest.mark.parametrize("changes", [*BROKEN, "[" * 200_000, "", "null", "[]"], ids=lambda c: str(c)[:60])
def test_a_broken_proof_is_told_and_other_kernels_are_served(kernels, changes):
    root = kernels({"relu": RELU, "add": ADD})
    prove(root, "relu", {"relu.default": {"float32": ANY}})
    prove(root, "add", {"add.Tensor": {"float32,float32": ANY}})
    path = proof_path(root / "relu" / "relu_implementation_1.py")
    if isinstance(changes, dict):
        whole = {**json.loads(path.read_text()), **changes}
        changes = json.dumps({name: value for name, value in whole.items() if value is not None})
    path.write_text(changes)
    with opforge.enabled(root, device="cpu") as made:
        assert made.refused["relu.default"] == f"{path} is broken; judge the kernel again with `opforge run`."
        assert not marked(torch.relu(torch.ones(3)))
        assert marked(torch.add(torch.ones(3), torch.ones(3)))


EXTENTS = [[[1, 8], [2, 4096]]]
"""Rows of up to 8, and of 2 to 4096 of them; of a vector up to 8."""


@pytest.mark.parametrize(
    ("shape", "inside"),
    [((8,), True), ((9,), False), ((2, 8), True), ((4096, 2), True), ((4096, 9), False), ((1, 8), False), ((4097, 1), False), ((2, 0), False), ((), True)],
)  # fmt: skip
def test_a_kernel_is_served_for_dimensions_as_long_as_those_that_were_judged(kernels, shape, inside):
    root = kernels({"relu": RELU})
    row = {**ANY, "rank": [0, 2], "numel": [0, 10**6], "timed": [[0, 10**6, True]], "layouts": ["contiguous", "empty"]}
    prove(root, "relu", {"relu.default": {"float32": {**row, "extents": EXTENTS}}})
    with opforge.enabled(root, device="cpu") as made:
        for _ in range(2):  # found out, and remembered
            assert marked(torch.relu(torch.ones(shape))) == (inside and 0 not in shape)
        reasons = made.counters()["relu.default"]["aten"]
    assert reasons == ({} if inside else {"extent not proven": 2})


def test_a_few_elements_far_apart_are_beyond_32_bits(kernels):
    root = kernels({"relu": RELU})
    prove(root, "relu", {"relu.default": {"float32": {**ANY, "layouts": ["contiguous", "pitched"]}}})
    with opforge.enabled(root, device="cpu") as made:
        assert marked(torch.relu(torch.ones(3, 8)[:, :4]))
        far = torch.empty_strided((2, 4), (1 << 31, 1), device="meta")
        assert made._kernels["relu.default"].why_not((far,), {}) == "steps too long for 32 bits not proven"


def test_each_tensor_argument_has_extents_of_its_own(kernels):
    root = kernels(
        {
            "mm": "import torch\ndef mm_kernel_impl(self, mat2):\n    return torch.bmm(self[None], mat2[None])[0] + MARK\n"
        }
    )
    row = {**ANY, "layouts": ["contiguous", "shapes differ"], "extents": [[[1, 4], [1, 4]], [[1, 100], [1, 4]]]}
    prove(root, "mm", {"mm.default": {"float32,float32": row}})
    with opforge.enabled(root, device="cpu"):
        assert marked(torch.mm(torch.ones(2, 4), torch.ones(4, 100)))
        assert not marked(torch.mm(torch.ones(2, 100), torch.ones(100, 2)))


def test_a_proof_of_another_format_does_not_hold(kernels):
    root = kernels({"relu": RELU})
    prove(root, "relu", {"relu.default": {"float32": ANY}}, opforge_proof=1)
    with pytest.warns(KernelWarning, match=r"another format \(1\)"), opforge.enabled(root, device="cpu") as made:
        assert "is of another format (1); judge it again" in made.refused["relu.default"]


def test_a_proof_is_void_when_what_the_kernel_imports_from_beside_it_has_changed(kernels):
    root = kernels({"relu": RELU.replace("import torch", "import torch\nfrom helper import nothing")})
    folder = root / "relu"
    (folder / "helper.py").write_text("from deeper.down import nothing\n")
    (folder / "deeper").mkdir()
    (folder / "deeper" / "down.py").write_text("nothing = 0\n")
    (folder / "unused.py").write_text("")
    prove(root, "relu", {"relu.default": {"float32": ANY}})
    (folder / "unused.py").write_text("changed = 1\n")
    with opforge.enabled(root, device="cpu"):
        assert marked(torch.relu(torch.ones(3)))
    (folder / "deeper" / "down.py").write_text("nothing = 1\n")
    with pytest.warns(KernelWarning, match="has changed since it was proven"):
        made = opforge.enable(root, device="cpu")
    assert not marked(torch.relu(torch.ones(3)))
    assert "has changed since it was proven" in made.refused["relu.default"]


def test_a_kernel_without_a_digest_is_not_served_whatever_its_proof_says(kernels):
    """Nobody could tell that its source was changed: it names a file that is too large to be read."""
    root = kernels({"relu": RELU.replace("import torch", "import torch\nNAMED = 'large.bin'")})
    large = root / "relu" / "large.bin"
    large.touch()
    os.truncate(large, 1 << 40)
    prove(root, "relu", {"relu.default": {"float32": ANY}}, digest=UNREADABLE)
    with pytest.warns(KernelWarning, match="no kernel is enabled"):
        made = opforge.enable(root, device="cpu")
    assert made.operators == []
    assert not marked(torch.relu(torch.ones(3)))
    made.disable()
    large.unlink()
    prove(root, "relu", {"relu.default": {"float32": ANY}})
    with opforge.enabled(root, device="cpu"):
        assert marked(torch.relu(torch.ones(3)))


def test_a_kernel_without_a_proof_is_refused(kernels):
    words = r"no kernel is enabled; relu\.default: relu_implementation_1 has no proof"
    with pytest.warns(KernelWarning, match=words), opforge.enabled(kernels({"relu": RELU}), device="cpu") as made:
        assert "has no proof; judge it with `opforge run`" in made.refused["relu.default"]


def test_composites_are_refused_with_the_reason(kernels):
    source = "def linear_kernel_impl(input, weight, bias=None):\n    return input\n"
    with opforge.enabled(kernels({"linear": source}), device="cpu", policy="all") as made:
        assert "would cut off gradients" in made.refused["linear.default"]


def test_an_operator_with_kernels_besides_its_composition_is_served(kernels):
    source = "def silu_backward_kernel_impl(grad_output, self):\n    return grad_output * 2\n"
    x = torch.ones(3, requires_grad=True)
    with opforge.enabled(kernels({"silu_backward": source}), device="cpu", policy="all") as made:
        torch.nn.functional.silu(x).sum().backward()
        assert made.counters()["silu_backward.default"]["served"] == 1
    assert x.grad.tolist() == [2, 2, 2]


def test_wrong_words_are_answered(kernels, tmp_path):
    root = kernels({"relu": RELU})
    with pytest.raises(OpforgeError, match="policy 'fast' is unknown; allowed: proven"):
        opforge.enable(root, policy="fast")
    with pytest.raises(UnknownNameError, match="relo"):
        opforge.enable(root, ops="relo")
    with pytest.raises(OpforgeError, match="no kernel directory"):
        opforge.enable(tmp_path / "nowhere")
    with pytest.raises(OpforgeError, match="has no kernels of its own"):
        opforge.enable("aten")


def test_ops_limit_what_is_enabled(kernels):
    with opforge.enabled(kernels({"relu": RELU, "add": ADD}), device="cpu", policy="all", ops="relu") as made:
        assert marked(torch.relu(torch.ones(2)))
        assert not marked(torch.ones(2) + 1)
        assert {op.split(".")[0] for op in made.operators} <= {"relu", "relu_"}


def test_two_at_once_the_last_first_and_each_out_by_itself(kernels):
    before = dumps()
    low = opforge.enable(kernels({"relu": RELU, "add": ADD}, 1000, "low"), device="cpu", policy="all")
    root = kernels({"relu": RELU}, 5000, "high")
    prove(root, "relu", {"relu.default": {"float32": {**ANY, "numel": [1, 4]}}})
    high = opforge.enable(root, device="cpu", policy="right")
    assert torch.relu(torch.ones(2))[0] == 5001
    assert torch.relu(torch.ones(8))[0] == 1001  # outside of the one that is asked first
    low.disable()
    assert torch.relu(torch.ones(8))[0] == 1
    assert torch.relu(torch.ones(2))[0] == 5001
    high.disable()
    assert dumps() == before


def test_a_kernel_that_starts_to_raise_falls_back_warns_once_and_is_out(kernels):
    source = """
import torch
calls = [0]
def relu_kernel_impl(self):
    calls[0] += 1
    if calls[0] > 100:
        raise ValueError("enough is enough")
    return self + 1000
"""
    x = torch.ones(2)
    with opforge.enabled(kernels({"relu": source}), device="cpu", policy="all") as made:
        for _ in range(100):
            assert marked(torch.relu(x))
        with pytest.warns(
            KernelWarning, match="relu_implementation_1 failed in a call of relu.default and was removed"
        ):
            assert torch.equal(torch.relu(x), x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(torch.relu(x), x)
        assert made.counters()["relu.default"]["served"] == 100
        assert made.counters()["relu.default"]["aten"] == {"raised ValueError: enough is enough": 1}


def test_where_aten_raises_too_the_kernel_stays(kernels):
    with opforge.enabled(kernels({"add": ADD}), device="cpu", policy="all"):
        with pytest.raises(RuntimeError, match="must match the size"):
            torch.ones(2) + torch.ones(3)
        assert marked(torch.ones(2) + 1)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("self.double()", "returned torch.float64, not torch.float32"),
        ("self[:1]", r"returned the shape \[1\], not \[2\]"),
        ("(self, self)", "returned tuple, not a tensor"),
        ("None", "returned NoneType, not a tensor"),
    ],
)
def test_outside_of_what_is_proven_results_are_looked_at(kernels, result, words):
    source = f"def relu_kernel_impl(self):\n    return {result}\n"
    with (
        opforge.enabled(kernels({"relu": source}), device="cpu", policy="all"),
        pytest.warns(KernelWarning, match=words),
    ):
        assert torch.relu(torch.ones(2)).dtype == torch.float32


def test_declining_is_no_fault(kernels):
    source = "def relu_kernel_impl(self):\n    raise NotImplementedError('not today')\n"
    with opforge.enabled(kernels({"relu": source}), device="cpu", policy="all") as made:
        for _ in range(2):
            assert torch.relu(torch.ones(2))[0] == 1
        assert made.counters()["relu.default"]["aten"] == {"declined: NotImplementedError: not today": 2}


def test_a_file_that_does_not_load_is_refused(kernels):
    root = kernels({"relu": "import nothing_of_the_kind\n"})
    words = "no kernel is enabled.*ModuleNotFoundError"
    with pytest.warns(KernelWarning, match=words), opforge.enabled(root, device="cpu", policy="all") as made:
        assert "ModuleNotFoundError" in made.refused["relu.default"]


def test_gradients_flow_and_the_kernel_sees_none(kernels):
    source = "def relu_kernel_impl(self):\n    assert not self.requires_grad\n    return self.clamp(min=0)\n"
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    with opforge.enabled(kernels({"relu": source}), device="cpu", policy="all") as made:
        torch.relu(x).sum().backward()
        assert made.counters()["relu.default"]["served"] == 1
    assert torch.equal(x.grad, torch.tensor([0.0, 1.0]))


def test_modes_and_transforms_go_through(kernels):
    x = torch.ones(2, 3)
    with opforge.enabled(kernels({"relu": RELU}), device="cpu", policy="all"):
        with torch.inference_mode():
            assert marked(torch.relu(x))
        assert marked(torch.vmap(torch.relu)(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert marked(torch.relu(x))
        assert torch.equal(torch.func.grad(lambda t: torch.relu(t).sum())(x), torch.ones(2, 3))


def test_threads_see_the_same_and_count_together(kernels):
    seen = []
    with opforge.enabled(kernels({"relu": RELU}), device="cpu", policy="all"):
        threads = [threading.Thread(target=lambda: seen.append(marked(torch.relu(torch.ones(3))))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == [True] * 4


def test_enabling_and_disabling_inside_a_forward_pass(kernels):
    root = kernels({"relu": RELU})

    class Model(torch.nn.Module):
        def forward(self, x):
            first = torch.relu(x)
            with opforge.enabled(root, device="cpu", policy="all"):
                second = torch.relu(x)
            return first, second, torch.relu(x)

    first, second, third = Model()(torch.ones(2))
    assert [marked(t) for t in (first, second, third)] == [False, True, False]


def test_an_exception_in_the_block_takes_the_kernels_out(kernels):
    before = dumps()
    with pytest.raises(KeyError), opforge.enabled(kernels({"relu": RELU}), device="cpu", policy="all"):
        raise KeyError
    assert dumps() == before


LOADER = """
import sys, torch, opforge
root = sys.argv[1]
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return torch.relu(torch.ones(2))
opforge.enable(root, device="cpu", policy="all")
found = list(torch.utils.data.DataLoader(Numbers(), num_workers=2))
print([bool((t >= 900).all()) for t in found], bool((torch.relu(torch.ones(1)) >= 900).all()))
"""


@pytest.mark.slow
def test_forked_workers_of_a_loader_have_the_kernels(kernels):
    root = kernels({"relu": RELU})
    done = subprocess.run([sys.executable, "-c", LOADER, str(root)], capture_output=True, text=True, check=False)
    assert done.stdout == "[True, True, True, True] True\n", done.stderr


COMPILED = """
import sys, warnings, torch, opforge
warnings.simplefilter("always")
made = opforge.enable(sys.argv[1], device="cpu", policy="all")
plain = torch.compile
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for size in (3, 4):
        torch.compile(lambda x: torch.relu(x) * 2, backend=sys.argv[2])(torch.ones(size))
words = [str(w.message) for w in said if w.category.__name__ == "KernelWarning"]
print(len(words), words[0].startswith("torch.compile is used"), made.counters()["relu.default"]["served"] > 0)
opforge.disable()
import torch._dynamo.callback as c
print(torch.compile is not plain, len(c.callback_handler.start_callbacks))
"""


@pytest.mark.slow
def test_compilation_is_warned_of_once(kernels):
    root = kernels({"relu": RELU})
    command = [sys.executable, "-c", COMPILED, str(root), "aot_eager"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[0] == "1 True True", done.stderr
    assert done.stdout.splitlines()[1].endswith(" 0")
