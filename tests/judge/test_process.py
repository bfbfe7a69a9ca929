"""A judge in this process: what it says of a job, with the kernel and a user's reference in processes of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from opforge.cases import Case
from opforge.judge.kernel_worker import WorkerConfig
from opforge.judge.process import Judge
from opforge.kernels import Kernel, ServedOperator
from opforge.kernels.kernel import Reference
from opforge.procs.channel import Channel
from opforge.runs.plan import Job, OperatorCases

Said = Callable[..., list[tuple[str, str]]]
MATRIX = "((T([3, 4], f32),), {})"
TWICE = "def twice_reference(x):\n    return 2 * x\n"
MANY_KINDS = "    return [x.t(), (x.sum(), None)], x.shape[0], 1.5, 2j, x.dtype, x.new_ones(1).expand(4), True\n"


@pytest.fixture
def said(shared_server, tmp_path: Path) -> Iterator[Said]:
    """Return a function that has a kernel judged; it returns verdict and reason of every case, in order."""
    ours, theirs = Channel.pair()
    judge = Judge(theirs, shared_server.spawner, WorkerConfig("cpu", 5.0, None), {})

    def judged(op: str, source: str, *texts: str, reference: str = "") -> list[tuple[str, str]]:
        name = op.partition(".")[0]
        file = tmp_path / f"kernel_{len(list(tmp_path.iterdir()))}.py"
        file.write_text(source)
        held_to = None
        if reference:
            (tmp_path / "reference.py").write_text(reference)
            held_to = Reference("mine", str(tmp_path / "reference.py"), (f"{name}_reference",))
        kernel = Kernel(name, op, (ServedOperator(op),), str(file), (f"{name}_kernel_impl",), reference=held_to)
        cases = [Case.make(op, text) for text in texts or (MATRIX,)]
        job = Job(kernel, (OperatorCases(op, True, cases),))
        judge.judge_job({"kernel": kernel.wire(), "ops": [part.wire() for part in job.operators], "batch": 64})
        rows = {}
        with contextlib.suppress(TimeoutError):
            while message := ours.receive(0.01):
                rows |= {row["id"]: (row["verdict"], row["reason"]) for row in message["verdicts"]}
        return [rows[case.id] for case in cases]

    yield judged
    if judge._custom._reference is not None:
        judge._custom._reference.close()
    ours.close()
    theirs.close()


def test_a_kernel_is_held_to_the_reference_in_every_form(said):
    right = "def twice_kernel_impl(x):\n    return x + x\n"
    assert said("twice", right, MATRIX, "((T([5], f16),), {})", reference=TWICE) == [("passed", "")] * 2
    by_layout = "def twice_kernel_impl(x):\n    return 2 * x if x.is_contiguous() else 3 * x\n"
    ((verdict, reason),) = said("twice", by_layout, reference=TWICE)
    assert verdict == "wrong"
    assert "the reference has" in reason


def test_answers_of_many_kinds_are_compared(said):
    kernel, reference = f"def twice_kernel_impl(x):\n{MANY_KINDS}", f"def twice_reference(x):\n{MANY_KINDS}"
    assert said("twice", kernel, reference=reference) == [("passed", "")]
    ((verdict, reason),) = said("twice", kernel.replace("1.5", "1.25"), reference=reference)
    assert (verdict, "1.25" in reason) == ("wrong", True), reason


def test_a_dtype_among_the_arguments_reaches_the_reference(said):
    source = "def twice_{}(x, *, dtype):\n    return (2 * x).to(dtype)\n"
    case = "((T([5], f32),), {'dtype': f16})"
    assert said("twice", source.format("kernel_impl"), case, reference=source.format("reference")) == [("passed", "")]


def test_a_reference_that_dies_again_and_again_is_not_asked_any_more(said):
    cases = [f"((T([{n}], f32),), {{}})" for n in range(2, 7)]
    dies = "import os\ndef twice_reference(x):\n    os._exit(3)\n"
    found = said("twice", "def twice_kernel_impl(x):\n    return x + x\n", *cases, reference=dies)
    assert {verdict for verdict, _ in found} == {"error"}
    assert "its process exited with status 3" in found[0][1]
    assert "is not called any more: its process died 3 times" in found[-1][1]


def test_an_operator_whose_reference_draws_may_draw_too(said):
    source = "import torch\ndef twice_{}(x):\n    return x + torch.rand_like(x)\n"
    assert said("twice", source.format("kernel_impl"), reference=source.format("reference")) == [("passed", "")]


KEEPS = "    return KEPT.setdefault((x.data_ptr(), x.shape), {}).clone()\n"
PRODUCT = "    return torch.mm(x, y.t())\n"
TWO = "((T([3, 4], f32), T([2, 4], f32)), {})"


@pytest.mark.parametrize(
    ("op", "function", "verdict", "words"),
    [
        ("twice", f"twice_kernel_impl(x):\n{KEEPS.format('2 * x')}", "cheated", "a replayed result"),
        ("abs.default", f"abs_kernel_impl(x):\n{KEEPS.format('x * x.sign()')}", "cheated", "a replayed result"),
        ("abs.default", "abs_kernel_impl(x):\n    return x + 0\n", "wrong", "ATen has"),
        ("linear.default", f"linear_kernel_impl(x, y):\n{PRODUCT}", "cheated", "ATen's own matrix product"),
        ("abs.default", "abs_kernel_impl(x):\n    return x\nos.kill = print\n", "cheated", "replaced os.kill"),
    ],
)
def test_what_a_kernel_is_turned_down_for(said, op, function, verdict, words):
    source = f"import os, torch\nKEPT = {{}}\ndef {function}"
    case = TWO if op == "linear.default" else MATRIX
    ((found, reason),) = said(op, source, case, reference=TWICE if op == "twice" else "")
    assert found == verdict, reason
    assert words in reason


FAILS_TOGETHER = """
import os, stat, time
from pathlib import Path
from opforge.procs.channel import Channel
def say_that_calls_failed():
    (to_judge,) = [n for n in range(3, 64) if is_socket(n)]
    Channel.from_fd(os.dup(to_judge)).send({{"failed_together": "RuntimeError: CUDA error: an illegal memory access"}})
    time.sleep(60)
def is_socket(number):
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:
        return False
def neg_kernel_impl(self):
    first = not Path({marker!r}).exists()
    Path({marker!r}).touch()
    if first or {always}:
        say_that_calls_failed()
    if {raises} and tuple(self.shape) == (5, 5):
        raise RuntimeError("CUDA error: an illegal memory access")
    return self * -1
"""
CALLS_THAT_FAIL = ("((T([3, 4], f32),), {})", "((T([5, 5], f32),), {})", "((T([2], f32),), {})")


def fails_together(tmp_path: Path, *, always: bool = False, raises: bool = False) -> str:
    """Return a kernel that says once, in its first process, that calls failed on the GPU, or always."""
    return FAILS_TOGETHER.format(marker=str(tmp_path.parent / f"{tmp_path.name}.called"), always=always, raises=raises)


def test_calls_that_failed_together_are_made_one_by_one(said, tmp_path):
    first, second, third = said("neg.default", fails_together(tmp_path, raises=True), *CALLS_THAT_FAIL)
    assert first == third == ("passed", "")
    assert second[0] == "error"
    assert "an illegal memory access" in second[1]


def test_a_failure_that_does_not_come_back_is_not_forgiven(said, tmp_path):
    found = said("neg.default", fails_together(tmp_path), *CALLS_THAT_FAIL[:2])
    assert {verdict for verdict, _ in found} == {"error"}
    assert all(
        "a call failed on the GPU when" in reason and "an illegal memory access" in reason for _, reason in found
    )


def test_declining_a_case_is_no_excuse_for_a_failure(said, tmp_path):
    declines = fails_together(tmp_path).replace(
        "    return self * -1", "    if self.numel() == 25:\n        raise NotImplementedError\n    return self * -1"
    )
    found = [verdict for verdict, _ in said("neg.default", declines, *CALLS_THAT_FAIL[:2])]
    assert found == ["error", "unsupported"]


def test_calls_made_one_by_one_do_not_fail_together(said, tmp_path):
    found = said("neg.default", fails_together(tmp_path, always=True), *CALLS_THAT_FAIL[:2])
    assert {verdict for verdict, _ in found} == {"contract"}
