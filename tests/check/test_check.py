"""`opforge check`: right operators pass, and each seeded defect is named by the check that is meant for it, with its fix."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from opforge import check as checking
from opforge.cache import torch_version
from opforge.check import CheckReport, Finding, OperatorReport, Status, target_loading
from opforge.check.findings import KIND_CONTENTS, KIND_ENDED, KIND_MEMORY, KIND_TRACING, demote_consequences
from opforge.cli.check import _lines
from opforge.errors import NothingToJudgeError, OpforgeError, UnknownNameError
from opforge.kernels.native import LibrarySpec, build
from tests.command import opforge
from tests.conftest import slow

HERE = Path(__file__).parent
SCALE = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

using torch::stable::Tensor;

Tensor halve(const Tensor& x) {
  STD_TORCH_CHECK(x.scalar_type() == torch::headeronly::ScalarType::Float, "float32 only");
  Tensor input = torch::stable::contiguous(x), result = torch::stable::empty_like(input);
  const float* from = static_cast<const float*>(input.const_data_ptr());
  float* to = static_cast<float*>(result.mutable_data_ptr());
  for (int64_t i = 0; i < input.numel() + PAST_THE_END; ++i) to[i] = from[i] / 2;
  return result;
}

STABLE_TORCH_LIBRARY_FRAGMENT(OPFORGE_NAMESPACE, m) { m.def("halve(Tensor x) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(OPFORGE_NAMESPACE, CPU, m) { m.impl("halve", TORCH_BOX(&halve)); }
"""


def check(target: Path | str, **options) -> CheckReport:
    return checking.run_checks(
        checking.parse_target(str(target)), checking.CheckOptions(**{"timeout_s": 60.0, **options})
    )


def by_name(report: CheckReport) -> dict[str, OperatorReport]:
    return {operator.name.partition("::")[2]: operator for operator in report.operators}


def said(operator: OperatorReport) -> str:
    return "\n".join(f"{f.check} {f.status}: {f.what} | {f.fix}" for f in operator.findings) + operator.unsupported


def holds(operator: OperatorReport, expected: str, words: str, fix: str, consequences: tuple[str, ...] = ()) -> None:
    """Hold that a check failed with these words and that fix, and that no other failed but as a consequence."""
    failures = operator.findings_with(Status.FAILED)
    assert any(f.check == expected and words in f.what and fix in f.fix for f in failures), said(operator)
    assert {f.check for f in failures} <= {expected, *consequences}, said(operator)


# ── right operators ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("file", [slow("python_ops.py"), slow("triton_ops.py")])
def test_right_operators_pass(file):
    report = check(HERE / "right" / file)
    assert {operator.name: operator.verdict for operator in report.operators} == {
        operator.name: "passed" for operator in report.operators
    }, "\n".join(map(said, report.operators))
    assert len(report.operators) == {"python_ops.py": 6, "triton_ops.py": 2}[file]
    assert report.exit_code == 0
    for operator in report.operators:
        assert {f.check for f in operator.findings} == set(checking.CHECKS) - {"inputs"}, said(operator)
        assert operator.calls
    interpreter = [note for note in report.notes if "TRITON_INTERPRET=1" in note]
    assert bool(interpreter) == (file == "triton_ops.py")


@pytest.mark.slow
def test_what_does_not_apply_is_skipped_with_its_reason():
    report = check(
        HERE / "right" / "python_ops.py",
        ops=("add_scaled_", "noise", "count"),
        skip=("compile", "opcheck", "mask", "fake"),
    )
    operators = by_name(report)
    reasons = {
        name: {f.check: f.what for f in operator.findings_with(Status.SKIPPED)} for name, operator in operators.items()
    }
    assert "writes to x" in reasons["add_scaled_"]["autograd"]
    assert "random" in reasons["noise"]["layouts"]
    assert "floating-point" in reasons["count"]["autograd"]
    assert report.left_out == ("compile", "opcheck", "mask", "fake")
    assert not any(f.check in report.left_out for operator in report.operators for f in operator.findings)


def native_package(folder: Path, source: str) -> Path:
    """Build a library, and write a package around it with a fake and a formula."""
    file = folder / "halve.cpp"
    file.write_text(source)
    library = build(LibrarySpec("checked_native", (file,), folder)).library
    package = folder / "checked_native"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import torch\n"
        f"torch.ops.load_library({str(library)!r})\n"
        "torch.library.register_fake('checked_native::halve', lambda x: x.new_empty(x.shape))\n"
        "torch.library.register_autograd('checked_native::halve', lambda ctx, grad: grad / 2)\n"
        "def halve(x):\n"
        "    return torch.ops.checked_native.halve(x)\n"
    )
    return package


@pytest.mark.slow
def test_a_library_in_c_plus_plus(tmp_path):
    (operator,) = check(native_package(tmp_path, SCALE.replace("PAST_THE_END", "0"))).operators
    assert operator.verdict == "passed", said(operator)
    assert any(f.check == "devices" and "none for CUDA" in f.what for f in operator.findings_with(Status.NOTE))
    assert any(f.check == "mask" for f in operator.findings_with(Status.PASSED))


@pytest.mark.slow
def test_a_library_that_writes_past_the_end(tmp_path):
    (operator,) = check(native_package(tmp_path, SCALE.replace("PAST_THE_END", "1"))).operators
    holds(operator, "mask", "1 elements past its end", "if (i < n)")


# ── seeded defects ─────────────────────────────────────────────────────────────────────────────────

CONTRACTS = {
    "fake_shape": ("fake", "the fake says shape [16, 6], the operator returns [6, 16]", "here it is [6, 16]"),
    "fake_dtype": ("fake", "the fake says torch.float16, the operator returns torch.float32", "dtype=torch.float32"),
    "fake_stride": ("fake", "strides [1, 6], the operator returns [16, 1]", "x.new_empty(x.shape)"),
    "fake_keeps_strides": ("fake", "(transposed)", "torch.empty_like(x) alone keeps the strides of x"),
    "fake_missing": ("fake", "there is no fake", 'register_fake("defect::fake_missing")', "compile"),
    "fake_of_two": ("fake", "the fake raises", "the fake must accept every call", "compile"),
    "fake_fixed_size": ("fake", "the fake fixes sizes (6, 16)", "do not turn sizes into numbers", "compile"),
    "fake_with_number": ("fake", "the fake fixes sizes (16)", "do not turn sizes into numbers", "compile"),
    "fake_of_contents": ("fake", "reads the contents of a tensor", "new_dynamic_size", "compile"),
    "undeclared_write": ("schema", "it writes to x", 'mutates_args=("x",)'),
    "alias_of_python": ("schema", "shares memory with an argument", "x.clone()"),
    "alias_of_library": ("schema", "shares memory with x", "x.clone()", "fake"),
    "gradient_wrong": ("autograd", "the gradient of x is", "setup_context"),
    "gradient_of_second": ("autograd", "the gradient of y is", "in the order of the arguments"),
    "gradient_missing": ("autograd", "there is no autograd formula", 'register_autograd("defect::gradient_missing"'),
    "gradient_of_expanded": ("autograd", "when the incoming gradient is expanded", "grad = grad.contiguous()"),
    "breaks_graph": ("compile", "contracts.breaks_graph: graph break at", "move it into the operator itself"),
    "not_contiguous": ("layouts", "transposed, pitched, strided", "x = x.contiguous()"),
    "not_deterministic": ("determinism", "the same call with the same seed gives a different result", "nondeterministic_seeded"),
    "vmap_wrong": ("vmap", "all batched", "move the batched dimension to the front"),
    "vmap_of_first": ("vmap", "the first batched", "move the batched dimension to the front"),
}  # fmt: skip


SOME_CONTRACTS = (
    "fake_shape", "fake_missing", "fake_fixed_size", "fake_of_contents", "undeclared_write", "alias_of_python",
    "gradient_wrong", "gradient_missing", "not_contiguous", "not_deterministic", "vmap_of_first", "untagged_random",
)  # fmt: skip
"""At least one for every check but `compile`, which takes long."""


@pytest.fixture(
    scope="module",
    params=[(SOME_CONTRACTS, ("opcheck", "mask", "compile")), slow(((), ()))],
    ids=["some", "all"],
)
def contracts(request) -> CheckReport:
    ops, skip = request.param
    report = check(HERE / "defects" / "contracts.py", ops=ops, skip=skip)
    assert set(by_name(report)) == set(ops or (*CONTRACTS, "untagged_random"))
    assert report.exit_code == 1
    return report


def test_defects_of_contracts(contracts):
    for name, operator in by_name(contracts).items():
        if name in CONTRACTS:
            expected, words, fix, *consequences = CONTRACTS[name]
            holds(operator, expected, words, fix, tuple(consequences))


def test_places_are_named(contracts):
    (finding,) = (f for f in by_name(contracts)["fake_of_contents"].findings_with(Status.FAILED) if f.check == "fake")
    assert "`if x.sum().item() > 0:`" in finding.what


def test_a_graph_break_is_named_with_its_place():
    (operator,) = check(HERE / "defects" / "contracts.py", ops=("breaks_graph",), skip=all_but("compile")).operators
    holds(operator, *CONTRACTS["breaks_graph"])
    (finding,) = operator.findings_with(Status.FAILED)
    assert "defects/contracts.py:" in finding.what
    assert "`if x.abs().sum().item() < 0:`" in finding.what


def test_a_random_operator_that_does_not_say_so_is_noted(contracts):
    operator = by_name(contracts)["untagged_random"]
    assert operator.verdict == "passed", said(operator)
    assert any(
        f.check == "determinism" and "torch.Tag.nondeterministic_seeded" in f.fix
        for f in operator.findings_with(Status.NOTE)
    )


def all_but(*checks: str) -> tuple[str, ...]:
    return tuple(check for check in checking.CHECKS if check not in (*checks, "inputs"))


@pytest.fixture(scope="module")
def sizes() -> CheckReport:
    """Operators in plain Python: Triton's interpreter takes long at many sizes."""
    inputs = str(HERE / "defects" / "sizes_inputs.py")
    return check(HERE / "defects" / "sizes.py", inputs=inputs, skip=all_but("mask", "devices"))


@pytest.mark.parametrize(
    ("name", "words", "fix"),
    [
        ("only_whole_blocks", "are never written: 5 of 5, the first at [0, 0]", "triton.cdiv(n, BLOCK)"),
        ("writes_past_the_end", "a tensor that it allocated: 27 elements past its end", "tl.store(y_ptr"),
        ("reads_past_the_end", "depends on memory outside its arguments", "tl.load(x_ptr + offsets, mask="),
        ("pads_with_ones", "a different result than the reference", "neutral value"),
        ("halves_the_rest", "give a different result than 1 alone, but", "triton.cdiv(n, BLOCK)"),
    ],
)
def test_defects_at_sizes_that_no_block_fits(sizes, name, words, fix):
    holds(by_name(sizes)[name], "mask", words, fix)


def test_an_operator_that_is_right_at_all_sizes_and_has_no_kernel_for_a_gpu(sizes):
    operator = by_name(sizes)["right"]
    assert operator.verdict == "passed", said(operator)
    assert operator.origin == "sizes_inputs.py"
    assert operator.calls == ("(f32[4, 32])", "(i64[3, 4])")
    (finding,) = operator.findings_with(Status.NOTE)
    assert (finding.check, finding.what) == ("devices", "there are kernels for CPU, none for CUDA")
    assert '@torch.library.register_kernel("sizes::right", "cuda")' in finding.fix


def test_calls_are_made_up_for_an_operator_that_has_none_in_the_file(sizes):
    operator = by_name(sizes)["made_up"]
    assert operator.verdict == "passed", said(operator)
    assert operator.origin == "made from the schema"
    assert operator.calls[0] == "(f32[6, 16], -1, 0.5, None)"
    assert any("f32[6, 16], -1, 0.5, f32[6, 16]" in call for call in operator.calls), "what is optional is given once"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "not_called_rightly",
            "on a call of sizes_inputs.py: not_called_rightly(f32[4, 32], 'up'): ValueError: how is 'up'",
        ),
        ("no_call_is_right", "calls generated from its schema (ValueError: how is 'none'; allowed: 'down'"),
        (
            "no_call_can_be_made",
            "no value can be generated for the argument how: Layout; give calls with --inputs FILE",
        ),
    ],
)
def test_an_operator_without_a_call_is_named_with_the_reason(sizes, name, words):
    operator = by_name(sizes)[name]
    assert operator.verdict == "unsupported"
    assert words in operator.unsupported


def test_the_report_as_json_says_what_the_report_says(sizes):
    answer = json.loads(json.dumps(sizes.as_json()))
    assert answer["counts"] == {"passed": 2, "failed": 5, "unsupported": 3}
    found = {row["name"]: row for row in answer["operators"]}["sizes::pads_with_ones"]
    assert found["verdict"] == "failed"
    assert {f["check"] for f in found["findings"] if f["status"] == "failed"} == {"mask"}


OTHER_CHECKS = ("opcheck", "compile", "vmap", "autograd")


@pytest.fixture(
    scope="module",
    params=[slow(OTHER_CHECKS)],
    ids=["more checks"],
)
def masks(request) -> CheckReport:
    inputs = str(HERE / "defects" / "mask_inputs.py")
    return check(HERE / "defects" / "masks.py", inputs=inputs, skip=request.param)


@pytest.mark.parametrize(
    ("name", "words", "fix"),
    [
        ("store_too_short", "are never written: 4 of 4, the first at [0, 0]", "triton.cdiv(n, BLOCK)"),
        (
            "store_without_mask",
            "it writes outside a tensor that it allocated: 28 elements past its end",
            "tl.store(y_ptr",
        ),
        ("load_without_mask", "depends on memory outside its arguments", "tl.load(x_ptr + offsets, mask="),
        ("load_with_other", "a different result than the reference", "neutral value"),
    ],
)
def test_defects_of_masks(masks, name, words, fix):
    holds(by_name(masks)[name], "mask", words, fix)


def test_small_blocks_are_noted(masks):
    operator = by_name(masks)["small_blocks"]
    assert operator.verdict == "passed", said(operator)
    (finding,) = (f for f in operator.findings_with(Status.NOTE) if f.check == "blocks")
    assert "BLOCK=16" in finding.what
    assert "16 elements each" in finding.what
    assert "1024" in finding.fix


@pytest.fixture(
    scope="module",
    params=[all_but("layouts", "mask"), slow(("opcheck", "vmap"))],
    ids=["some checks", "more checks"],
)
def ends(request) -> CheckReport:
    return check(HERE / "defects" / "ends.py", timeout_s=5.0, skip=request.param)


@pytest.mark.parametrize(
    ("name", "expected", "words", "fix"),
    [
        ("segfault_on_strides", "layouts", "SIGSEGV (signal 11), at segfault_on_strides(f32[6, 16] strides [1, 6])", "contiguous()"),
        ("segfault_always", "inputs", "segfault_always(f32[6, 16]) ended the process, which died of SIGSEGV", "TORCH_CHECK"),
        ("hangs_at_33", "mask", "no answer within 5 s", "--timeout"),
        ("exits_on_empty", "layouts", "exited with status 0, at exits_on_empty(f32[0, 16])", "an empty tensor"),
    ],
)  # fmt: skip
def test_what_ends_or_hangs_is_its_own_finding(ends, name, expected, words, fix):
    holds(by_name(ends)[name], expected, words, fix)


def test_the_others_go_on_after_a_crash(ends):
    assert by_name(ends)["right"].verdict == "passed", said(by_name(ends)["right"])
    expected = {f.check for f in by_name(ends)["right"].findings_with(Status.PASSED)} - {
        "layouts",
        "fake",
    }  # where it crashes
    assert {f.check for f in by_name(ends)["segfault_on_strides"].findings_with(Status.PASSED)} == expected


def test_what_follows_from_a_failure_is_a_note():
    shape = Finding("fake", Status.FAILED, "shape")
    follows = Finding("opcheck", Status.FAILED, "test_faketensor: …", kind="test_faketensor")
    own = Finding("opcheck", Status.FAILED, "test_autograd_registration: …", kind="test_autograd_registration")
    first = Finding("layouts", Status.FAILED, "died", kind=KIND_ENDED)
    second = Finding("fake", Status.FAILED, "died", kind=KIND_ENDED)
    assert [f.status for f in demote_consequences([follows, own, shape])] == [Status.FAILED, Status.NOTE, Status.FAILED]
    assert {f.check: f.status for f in demote_consequences([second, first])} == {
        "layouts": Status.FAILED,
        "fake": Status.NOTE,
    }


def test_what_cannot_be_traced_for_its_fake_is_a_note():
    fake = Finding("fake", Status.FAILED, "the fake raises")
    traced = Finding("compile", Status.FAILED, "TorchRuntimeError: …", kind=KIND_TRACING)
    graph_break = Finding("compile", Status.FAILED, "graph break")
    assert [f.status for f in demote_consequences([traced, graph_break])] == [Status.FAILED, Status.FAILED]
    found = demote_consequences([fake, traced, graph_break])
    assert [(f.check, f.status) for f in found] == [
        ("fake", Status.FAILED), ("compile", Status.NOTE), ("compile", Status.FAILED),
    ]  # fmt: skip


def test_operators_of_an_installed_package_are_its_own():
    """torchao registers operators from Python; a file that imports it does not."""
    assert {target_loading._installed_package(name) for name in ("aten::add.Tensor", "no::such")} == {""}
    code = (
        "import torchao; from opforge.check import target_loading as t; "
        "print(*(t._installed_package(f'torchao::{n}') for n in ('quantize_affine', 'int_matmul')))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["torchao", "torchao"], done.stderr


def test_contents_say_nothing_of_an_operator_that_leaves_its_memory():
    written = Finding("schema", Status.FAILED, "it writes to x", "declare it", KIND_CONTENTS)
    changes = Finding("determinism", Status.FAILED, "another answer", "look for state", KIND_CONTENTS)
    shape = Finding("fake", Status.FAILED, "shape", "say 16")
    opcheck = Finding("opcheck", Status.FAILED, "test_schema: …", kind="test_schema")
    outside = Finding("mask", Status.FAILED, "it writes outside", "store with a mask", KIND_MEMORY)
    wrong = Finding("mask", Status.FAILED, "a different result than the reference")

    assert not any(f.status is Status.NOTE for f in demote_consequences([written, changes, shape, wrong]))
    found = {f.check: f for f in demote_consequences([written, changes, shape, opcheck, outside])}
    assert {f.check for f in found.values() if f.status is Status.FAILED} == {"mask", "fake"}
    assert found["schema"].what == "it writes to x; this may be caused by the failure of mask"
    assert not found["schema"].fix
    assert found["opcheck"].what == "test_schema fails too, as expected after mask"


HELPERS = """
import torch
import torch.ao.quantization.fx._decomposed

def made(name, function, schema, fake=lambda x, *_: x.new_empty(x.shape)):
    operator = torch.library.custom_op(f"helped::{name}", function, mutates_args=(), schema=schema)
    operator.register_fake(fake)
    return operator

def sixteen(x):
    if x.shape[-1] != 16:
        raise ValueError("sixteen columns only")
    return (x * x).contiguous()

square = made("square", sixteen, "(Tensor x) -> Tensor")
square.register_autograd(
    lambda ctx, grad: torch.ops.helped.slope(grad, ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)
made("slope", lambda grad, x: (2 * grad * x).contiguous(), "(Tensor grad, Tensor x) -> Tensor")
made("image_gradient", lambda x: (2 * x).contiguous(), "(Tensor x) -> Tensor")
torch.library.define("helped::no_kernel", "(Tensor x) -> Tensor")

def refuses(x):
    raise TypeError("a fake that takes nothing")

made("unlike_its_fake", lambda x: x + 1, "(Tensor x) -> Tensor", refuses)
torch.library.custom_op("helped::count", lambda x: x.numel(), mutates_args=(), schema="(Tensor x) -> int")
"""


@pytest.fixture(scope="module")
def helped(tmp_path_factory) -> CheckReport:
    file = tmp_path_factory.mktemp("helped") / "helped.py"
    file.write_text(HELPERS)
    return check(file, skip=all_but("autograd", "mask"))


def test_part_of_a_backward_is_what_a_backward_calls_not_what_is_named_so(helped):
    operators = by_name(helped)
    (finding,) = (f for f in operators["slope"].findings if f.check == "autograd")
    assert (finding.status, operators["slope"].verdict) == (Status.NOTE, "passed")
    assert "the backward of helped::square calls it" in finding.what
    holds(operators["image_gradient"], "autograd", "there is no autograd formula", "register_autograd")


def test_refused_sizes_are_named_with_the_line_that_refuses_them(helped):
    whats = [f.what for f in by_name(helped)["square"].findings if f.check == "mask" and f.what]
    line = HELPERS.splitlines().index('        raise ValueError("sixteen columns only")') + 1
    place = f"helped.py:{line} (`raise ValueError("
    assert any("64 for 16 in square(f32[6, 16]): ValueError: sixteen columns only" in what for what in whats), whats
    assert all(place in what for what in whats), whats


def test_calls_that_only_the_operator_accepts_may_be_invalid(helped):
    notes = {name: [f.what for f in operator.findings_with(Status.NOTE)] for name, operator in by_name(helped).items()}
    assert any("the calls below may be invalid" in what for what in notes["unlike_its_fake"])
    assert not any("may be invalid" in what for what in notes["square"] + notes["count"])


@pytest.mark.slow
def test_an_operator_without_a_tensor_as_result_is_not_compiled(tmp_path):
    file = tmp_path / "counts.py"
    file.write_text(
        "import torch\n"
        "torch.library.custom_op('counts::count', lambda x: x.numel(), mutates_args=(), schema='(Tensor x) -> int')\n"
    )
    (operator,) = check(file, skip=all_but("compile")).operators
    assert [(f.check, f.status) for f in operator.findings] == [("compile", Status.SKIPPED)]
    assert "it returns no tensor" in operator.findings[0].what


def test_operators_of_torch_are_counted_and_one_without_kernels_says_so(helped):
    (note,) = (note for note in helped.notes if note.startswith("not checked: "))
    assert re.search(r"not checked: \d+ operators that torch itself registers.*quantized_decomposed \d+", note)
    assert "without a kernel for any device" in by_name(helped)["no_kernel"].unsupported


def test_the_text_repeats_no_fix_and_no_reason_and_may_be_brief():
    missing = Finding("vmap", Status.FAILED, "there is no rule", "register one for ns::{}")
    named = [
        OperatorReport(f"ns::{name}", "", findings=(replace(missing, fix=missing.fix.format(name)),)) for name in "ab"
    ]
    unsupported = [OperatorReport(f"ns::{name}", "", unsupported="no kernel") for name in "cd"]
    skipped = Finding("mask", Status.SKIPPED, "no size")
    small = Finding("blocks", Status.NOTE, "small", "larger")
    note = OperatorReport("ns::e", "", findings=(small, skipped))
    named[0] = replace(named[0], findings=(*named[0].findings, skipped))
    report = CheckReport("ns", "cpu", (*named, unsupported[0], note, unsupported[1]))
    assert _lines(report, brief=False)[1:] == [
        "ns::a  failed       skipped: mask", "  failed  vmap         there is no rule", "    fix  register one for ns::a",
        "  skipped mask         no size",
        "ns::b  failed", "  failed  vmap         there is no rule", "    fix  as for ns::a, above",
        "ns::c  unsupported", "ns::d  unsupported", "  not judged  no kernel",
        "ns::e  passed       skipped: mask", "  note    blocks       small", "    fix  larger", "1 passed, 2 failed, 2 unsupported",
    ]  # fmt: skip
    details = ("    fix  ", "  note  ", "  skipped ")
    brief = [line for line in _lines(report, brief=False)[1:] if not line.startswith(details)]
    assert _lines(report, brief=True)[1:] == brief


# ── targets, inputs, words ─────────────────────────────────────────────────────────────────────────


def package(folder: Path, name: str, source: str, **files: str) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(source)
    for stem, text in files.items():
        (folder / name / f"{stem}.py").write_text(text)
    return folder / name


ONLY_MATRIX = """
import torch
@torch.library.custom_op("{name}::halve", mutates_args=(), schema="(Tensor x, str how) -> Tensor")
def halve(x, how):
    if how != "down":
        raise ValueError(f"how is {{how!r}}; allowed: 'down'")
    return x.contiguous() / 2
@halve.register_fake
def _(x, how):
    return x.new_empty(x.shape)
halve.register_autograd(lambda ctx, grad: (grad / 2, None))
"""
INPUTS = "import torch\ndef inputs():\n    return {{'{name}::halve': [((torch.randn(4, 8), 'down'), {{}})]}}\n"
QUICK = ("compile", "opcheck", "mask", "vmap")


@pytest.mark.slow
def test_an_operator_that_takes_no_call_is_named_and_not_dropped(tmp_path):
    report = check(package(tmp_path, "no_call", ONLY_MATRIX.format(name="no_call")), skip=QUICK)
    (operator,) = report.operators
    assert operator.verdict == "unsupported"
    assert "how is 'none'; allowed: 'down'" in operator.unsupported
    assert "--inputs FILE" in operator.unsupported
    assert report.exit_code == 5


@pytest.mark.slow
def test_inputs_that_a_package_declares(tmp_path):
    folder = package(
        tmp_path / "project" / "src",
        "declares",
        ONLY_MATRIX.format(name="declares"),
        opforge_inputs=INPUTS.format(name="declares"),
    )
    report = check(folder.parent.parent, skip=QUICK)
    (operator,) = report.operators
    assert operator.verdict == "passed", said(operator)
    assert operator.origin == "declares.opforge_inputs"
    assert operator.calls == ("(f32[4, 8], 'down')",)


@pytest.mark.slow
def test_inputs_of_a_file_that_are_not_taken(tmp_path):
    (tmp_path / "mine.py").write_text(INPUTS.format(name="wrong_inputs").replace("'down'", "'up'"))
    folder = package(tmp_path, "wrong_inputs", ONLY_MATRIX.format(name="wrong_inputs"))
    (operator,) = check(folder, inputs=str(tmp_path / "mine.py"), skip=QUICK).operators
    assert operator.verdict == "unsupported"
    assert "raises on a call of mine.py" in operator.unsupported


@pytest.mark.slow
def test_an_operator_of_torch_by_name_where_the_cache_is_broken(tmp_path, monkeypatch):
    monkeypatch.setenv("OPFORGE_CACHE", str(tmp_path))
    kept = tmp_path / "checking" / f"modules-{torch_version()}.json"
    kept.parent.mkdir()
    kept.write_text("[")
    report = check("aten::silu", skip=("opcheck",))
    assert [operator.name for operator in report.operators] == ["aten::silu", "aten::silu.out"]
    assert report.operators[0].verdict == "passed", said(report.operators[0])
    modules = json.loads(kept.read_text())
    assert modules != sorted(modules), "as they were imported: in another order some are refused"


@pytest.mark.slow
def test_an_operator_by_name_with_what_registers_it(tmp_path):
    folder = package(
        tmp_path, "by_name", ONLY_MATRIX.format(name="by_name"), opforge_inputs=INPUTS.format(name="by_name")
    )
    target = checking.parse_target("by_name::halve", str(folder))
    (operator,) = checking.run_checks(target, checking.CheckOptions(skip=QUICK)).operators
    assert operator.verdict == "passed", said(operator)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("no/such/file.py", "there is no file"),
        ("::", "not the name of an operator"),
        ("a b", "neither a folder, nor a .py file"),
        ("no_such_module_at_all", "importing no_such_module_at_all raises ModuleNotFoundError"),
        ("nosuch::op", "unknown operator 'nosuch::op'"),
    ],
)
def test_bad_targets(target, words):
    with pytest.raises(OpforgeError, match="(?s)" + re.escape(words)):
        check(target, skip=QUICK)


def test_what_a_target_stands_for(tmp_path):
    folder = package(tmp_path / "project" / "src", "my_ops", "")
    for target in (checking.parse_target(str(folder)), checking.parse_target(str(tmp_path / "project"))):
        assert (target.module, target.paths, target.operator) == ("my_ops", (str(folder.parent),), "")
    by_name = checking.parse_target("my_ops::halve", str(folder))
    assert (by_name.module, by_name.paths, by_name.operator) == ("my_ops", (str(folder.parent),), "my_ops::halve")


def test_bad_options(tmp_path):
    with pytest.raises(UnknownNameError, match="did you mean 'autograd'"):
        checking.CheckOptions(skip=("autogad",))
    with pytest.raises(OpforgeError, match="cpu, cuda, cuda:N"):
        checking.CheckOptions(device="tpu")
    with pytest.raises(OpforgeError, match="--timeout 0"):
        checking.CheckOptions(timeout_s=0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(OpforgeError, match="holds no package"):
        checking.parse_target(str(tmp_path / "empty"))
    with pytest.raises(OpforgeError, match="--import"):
        checking.parse_target("math", "json")


def test_nothing_registered_is_exit_code_5(tmp_path):
    file = tmp_path / "plain.py"
    file.write_text("x = 1\n")
    with pytest.raises(OpforgeError, match="registers no operator") as caught:
        check(file)
    assert caught.value.exit_code == NothingToJudgeError.exit_code


def test_an_import_that_ends_its_process(tmp_path):
    file = tmp_path / "dies.py"
    file.write_text("import os\nos.kill(os.getpid(), 11)\n")
    with pytest.raises(OpforgeError, match=r"importing .*dies.py ended its process, which died of SIGSEGV"):
        check(file)


def test_the_command():
    file = HERE / "defects" / "contracts.py"
    words = ("check", str(file), "--ops", "undeclared_write,defect::fake_dt*", "--skip", ",".join((*QUICK, "layouts")))
    done = opforge(*words)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1] == "note  left out: compile, opcheck, mask, vmap, layouts"
    assert lines[2].startswith("defect::fake_dtype        failed")
    place = lines.index(next(line for line in lines if line.startswith("  failed  schema")))
    assert lines[place + 1].startswith("    fix  say so: mutates_args")
    assert lines[-1] == "2 failed"
    assert opforge("check", str(file), "--format", "xml").returncode == 2


@pytest.mark.slow
def test_the_command_in_json():
    file = HERE / "defects" / "contracts.py"
    words = ("check", str(file), "--ops", "undeclared_write,defect::fake_dt*", "--skip", ",".join((*QUICK, "layouts")))
    answer = json.loads(opforge(*words, "--format", "json").stdout)
    assert answer["counts"] == {"passed": 0, "failed": 2, "unsupported": 0}
    assert {f["check"] for f in answer["operators"][1]["findings"] if f["status"] == "failed"} == {"schema"}


PUBLIC = "optimum-quanto==0.2.7"


@pytest.fixture(scope="module")
def public(tmp_path_factory) -> Path:
    """A small package of other people's, from PyPI."""
    folder = tmp_path_factory.mktemp("public")
    words = ["--quiet", "--no-deps", "--retries", "1", "--timeout", "15", "--target", str(folder)]
    command = ["timeout", "120", sys.executable, "-m", "pip", "install", *words, PUBLIC]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{PUBLIC} cannot be installed, which needs the network: {done.stderr.strip()[-200:]}")
    return folder


@pytest.mark.slow
def test_a_public_package(public, monkeypatch):
    """Its matrix product has no gradient, which opcheck says too; its quantisation is right; one kernel has no definition."""
    monkeypatch.setenv("PYTHONPATH", str(public), prepend=os.pathsep)
    report = check("optimum.quanto.library", ops=("qbytes_mm", "quantize_affine"))
    operators = {operator.name: operator for operator in report.operators}
    assert {name: operator.verdict for name, operator in operators.items()} == {
        "quanto::qbytes_mm": "failed", "quanto::quantize_affine": "passed", "quanto_py::qbytes_mm": "unsupported",
    }, "\n".join(map(said, report.operators))  # fmt: skip
    holds(
        operators["quanto::qbytes_mm"],
        "autograd",
        "there is no autograd formula",
        'register_autograd("quanto::qbytes_mm"',
    )
    assert any(f.kind == "test_autograd_registration" for f in operators["quanto::qbytes_mm"].findings)
    assert "nothing defines it" in operators["quanto_py::qbytes_mm"].unsupported


def test_main_needs_no_torch():
    code = "import sys; import opforge.check, opforge.cli.check; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
