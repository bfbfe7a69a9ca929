"""A case of a run again: whatever its suite, on the same contents, with the kernel as it is now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opforge.backends.single import SingleBackend
from opforge.cli.main import call
from opforge.errors import OpforgeError, RunDirectoryError
from opforge.runs import RunConfig, run
from opforge.runs.reproduce import find_row, reproduce
from opforge.suites.given import GivenSuite, performance_case
from tests.conftest import UNARY, gen_input

WRONG = "import torch\ndef relu_kernel_impl(self):\n    return torch.where(self <= 0.5, 0, self)\n"
RIGHT = WRONG.replace("0.5", "0")


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_the_same_case_gets_the_same_verdict_and_reason(judge_tiny, kernel_directory, tmp_path):
    root = kernel_directory({"relu": WRONG})
    judge_tiny(root, {"relu.default": UNARY, "relu_.default": UNARY})
    wrong = [row for row in rows_of(tmp_path / "run") if row["op"] == "relu_.default" and row["verdict"] == "wrong"]
    again = reproduce(tmp_path / "run", wrong[-1]["id"][:12], tmp_path / "again")
    assert (again.after.verdict, again.after.reason) == (wrong[-1]["verdict"], wrong[-1]["reason"])
    assert again.is_same_verdict
    assert again.changed == ()
    assert again.exit_code == 1
    assert len(rows_of(tmp_path / "again")) == 1


@pytest.mark.slow
def test_a_mended_kernel_passes_and_a_newer_one_is_not_taken_for_it(judge_tiny, kernel_directory, tmp_path):
    root = kernel_directory({"relu": WRONG})
    judge_tiny(root, {"relu.default": UNARY})
    (root / "relu" / "relu_implementation_2.py").write_text(RIGHT)
    case = rows_of(tmp_path / "run")[0]["id"]
    assert reproduce(tmp_path / "run", case, tmp_path / "again").exit_code == 1
    file = root / "relu" / "relu_implementation_1.py"
    file.write_text(RIGHT)
    mended = reproduce(tmp_path / "run", case, tmp_path / "mended")
    assert mended.exit_code == 0
    assert mended.changed == (str(file.resolve()),)
    file.unlink()
    with pytest.raises(OpforgeError):
        reproduce(tmp_path / "run", case, tmp_path / "gone")


@pytest.mark.slow
def test_custom_operators_on_the_inputs_of_the_run(judge_custom, tmp_path):
    files = {
        "gen_input.py": gen_input("Test(lambda: torch.rand(7))"),  # other contents each time it is asked
        "double_reference.py": "def double_kernel_impl(x):\n    return x * 2\n",
        "double_right.py": "def double_kernel_impl(x):\n    return x + x\n",
        "double_wrong.py": "def double_kernel_impl(x):\n    return x * 2 + x[0]\n",
    }
    judge_custom({"double": files})
    (before,) = [row for row in rows_of(tmp_path / "run") if row["verdict"] == "wrong"]
    with pytest.raises(OpforgeError, match="several kernels: double__right, double__wrong; say which"):
        reproduce(tmp_path / "run", before["id"], tmp_path / "again")
    again = reproduce(tmp_path / "run", before["id"], tmp_path / "again", kernel=before["kernel"])
    assert again.after.reason == before["reason"]  # which has numbers of these contents
    with pytest.raises(OpforgeError, match="was not judged for kernel 'x'"):
        find_row(tmp_path / "run", before["id"], "x")


def test_a_case_that_was_given_to_be_timed(judge_tiny, kernel_directory, tmp_path):
    root = kernel_directory({"relu": WRONG})
    backend = SingleBackend.from_argument(str(root / "relu"))
    case = performance_case("relu.default", UNARY[0])
    run(RunConfig("given", "kernel", workers=1), tmp_path / "run", suite=GivenSuite([case]), backend=backend)
    again = reproduce(tmp_path / "run", case.id, tmp_path / "again")
    assert again.is_same_verdict
    assert again.after.verdict == "wrong"


def test_cases_that_are_not_there(judge_tiny, kernel_directory, tmp_path):
    root = kernel_directory({"relu": WRONG})
    judge_tiny(root, {"relu.default": UNARY})
    for name in ("", "zz"):
        with pytest.raises(OpforgeError, match=f"no case '{name}'"):
            find_row(tmp_path / "run", name)
    line = rows_of(tmp_path / "run")[0]
    with (tmp_path / "run" / "results.jsonl").open("a") as handle:
        for last in "ab":
            handle.write(json.dumps({**line, "id": f"not a digest {last}"}) + "\n")
    with pytest.raises(OpforgeError, match="matches several ids: not a digest a, not a digest b"):
        find_row(tmp_path / "run", "not")
    with pytest.raises(RunDirectoryError, match="has no case not a digest a any more"):
        reproduce(tmp_path / "run", "not a digest a", tmp_path / "again")


def test_the_command(judge_tiny, kernel_directory, tmp_path, capsys):
    root = kernel_directory({"relu": WRONG})
    judge_tiny(root, {"relu.default": UNARY})
    line = rows_of(tmp_path / "run")[0]
    words = ["reproduce", str(tmp_path / "run"), line["id"]]
    assert call(words) == 1
    assert f"in the run   wrong: {line['reason']}\nnow          wrong: {line['reason']}\n" in capsys.readouterr().out
    (root / "relu" / "relu_implementation_1.py").write_text(RIGHT)
    assert call([*words, "--format", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["before"]["verdict"], answer["now"]["verdict"]) == ("wrong", "passed")
    assert len(answer["changed"]) == 1
    assert call([*words[:2], "zz"]) == 2
