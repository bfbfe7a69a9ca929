"""The verbs, as users type them."""

from __future__ import annotations

import ast
import csv
import json
import os
import shutil
import subprocess
import sys

import pytest

from opforge.cli.main import call
from opforge.kernels.proof import proof_path
from tests.command import opforge, opforge_process
from tests.conftest import ROOT, slow
from tests.install.proving import prove, write

RELU = "import torch\ndef relu_kernel_impl(self):\n    return torch.where(self <= 0, 0, self)\n"


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """A run of ATen that has ended, and what the command answered. Copy the folder to change it."""
    out = tmp_path_factory.mktemp("smoke") / "run"
    done = opforge("run", "--suite", "smoke", "--backend", "aten", "--out", str(out))
    assert done.returncode == 0, done.stderr
    return done, out


def test_run_writes_everything(smoke):
    done, out = smoke
    assert "correctness  1.0000" in done.stdout
    assert "perf@1" in done.stdout
    names = {p.name for p in out.iterdir()} - {".lock"}
    assert names == {
        "manifest.json", "results.jsonl", "OVERALL_SUMMARY.md", "operator_summary.csv", "failed_tests.json", "full_results.json",
        "report.html",
    }  # fmt: skip
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["versions"]["torch"]
    assert manifest["config"]["suite"] == "smoke"
    assert manifest["scores"]["correctness"] == 1.0
    spent = manifest["activity"]
    assert spent["judging_s"] > 0 < spent["timing_s"]
    assert (
        f"| time of all workers | judging {spent['judging_s']:.1f} s, timing"
        in (out / "OVERALL_SUMMARY.md").read_text()
    )
    rows = json.loads((out / "full_results.json").read_text())
    assert {row["phase"] for row in rows} == {"correctness", "performance"}
    assert set(rows[0]) >= {"op", "kernel", "suite", "case", "phase", "verdict", "reason", "id"}
    assert json.loads((out / "failed_tests.json").read_text()) == []
    (line,) = csv.DictReader((out / "operator_summary.csv").read_text().splitlines())
    assert (line["op"], line["passed"]) == ("relu.default", "2")


def test_json_on_stdout_from_a_process_without_torch(tmp_path):
    """Importing torch takes seconds, so only the processes that need it do."""
    run = str(tmp_path / "run")
    commands = [
        ["run", "--suite", "smoke", "--backend", "aten", "--out", run, "--format", "json"],
        ["report", run, "--format", "json"],
        ["compare", run, run],
        ["leaderboard", run],
    ]
    code = (
        "import sys\nsys.modules['torch'] = None\nfrom opforge.cli.main import call\n"
        f"print([call(words) for words in {commands!r}], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "[0, 0, 0, 0]", done.stderr
    answer, end = json.JSONDecoder().raw_decode(done.stdout)
    assert answer["scores"]["correctness"] == 1.0
    assert answer["operators"][0]["op"] == "relu.default"
    assert done.stdout[end:].lstrip().startswith("{")


@pytest.mark.slow
def test_the_default_folder_is_named_and_used(tmp_path):
    done = opforge("run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "opforge-runs").iterdir()
    assert f"opforge-runs/{folder.name}" in done.stdout


def test_report_shows_a_run_again(tmp_path, kernel_directory):
    root = kernel_directory({"relu": "def relu_kernel_impl(self):\n    return self.double()\n"})
    out = tmp_path / "run"
    first = opforge("run", "--backend", "directory", "--ops-directory", str(root), "--out", str(out))
    assert first.returncode == 1
    again = opforge("report", str(out))
    assert again.returncode == 1
    assert again.stdout in first.stdout
    assert "contract" in again.stdout
    markdown = opforge("report", str(out), "--format", "markdown").stdout
    assert "## Failures by operator" in markdown
    assert json.loads(opforge("report", str(out), "--format", "json").stdout)["correctness"] == 0.0
    assert opforge("report", str(tmp_path)).returncode == 2
    assert "holds no run" in opforge("report", str(out / "results.jsonl")).stderr


@pytest.mark.parametrize("command", [slow(["-m", "BackendBench.scripts.main"]), slow(["BackendBench/scripts/main.py"])])
def test_the_known_names_do_the_same(command, tmp_path):
    words = ["--suite", "smoke", "--backend", "aten", "--ops", "relu", "--out", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, *command, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "aten on smoke" in done.stdout


def test_the_known_names_work_in_a_checkout_that_is_not_installed():
    code = (
        "import sys, importlib.metadata as m, importlib.util as u\n"
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f)]\n"
        "sys.path = [p for p in sys.path if not p.rstrip('/').endswith('/src')]\n"
        "assert u.find_spec('opforge') is None\n"
        "import BackendBench.suite.base\nprint(BackendBench.suite.base.Test)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "opforge.cases.test.Test" in done.stdout


def test_ls():
    assert "smoke" in opforge("ls", "suites").stdout
    assert "directory" in opforge("ls", "backends").stdout
    assert "add.Tensor" in opforge("ls", "ops", "--ops", "add").stdout
    assert len(opforge("ls", "ops").stdout.splitlines()) > 3000
    kernels = opforge("ls", "kernels", "--ops-directory", "examples/generated_kernels").stdout
    assert "relu_implementation_1" in kernels
    assert "relu_.default" in kernels


FLOAT32 = {"rank": [0, 2], "numel": [0, 9], "layouts": ["contiguous"]}


@pytest.mark.parametrize(
    ("dtypes", "changes", "mark"),
    [
        (["float32", "float32,float32", "float32,number(int)"], {}, "proven for float32"),
        (["float32", "bfloat16", "float32,int64,"], {}, "proven for bfloat16, float32, float32 with int64"),
        (["a", "b", "[c]*n", "d", "e", "f"], {}, "proven for a, b, c, d and 2 more"),
        (["float32"], {"device": "NVIDIA H200"}, "proven for float32 on NVIDIA H200"),
        (["float32"], {"torch": "2.1.0"}, ""),
        (["float32"], {"digest": "0123456789abcdef"}, ""),
        (["float32"], {"operators": {}}, ""),
        (["float32"], {"operators": None}, ""),
        (["float32"], {"opforge_proof": 1}, ""),
    ],
)
def test_ls_marks_kernels_that_are_proven(tmp_path, capsys, dtypes, changes, mark):
    file = tmp_path / "relu" / "relu_implementation_1.py"
    file.parent.mkdir()
    file.write_text(RELU)
    prove(tmp_path, "relu", {"relu.default": dict.fromkeys(dtypes, FLOAT32)})
    proof = proof_path(file)
    write(proof, {**json.loads(proof.read_text()), **changes})
    assert call(["ls", "kernels", "--ops-directory", str(tmp_path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split("relu.out", 1)[1] == (f"; {mark}" if mark else "")


def test_setup_makes_templates_that_run_and_decline(tmp_path):
    words = ("setup", "--suite", "smoke", "--ops-directory", "kernels")
    made = opforge(*words, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    source = tmp_path / "kernels" / "relu" / "relu_implementation_1.py"
    assert subprocess.run([sys.executable, str(source)], check=False, capture_output=True).returncode == 0
    judged = opforge("run", "--backend", "directory", "--ops-directory", "kernels", cwd=tmp_path)
    assert judged.returncode == 1
    assert "fill in relu" in judged.stdout
    source.write_text(RELU)
    assert "0 kernels to fill in" in opforge(*words, cwd=tmp_path).stdout
    assert source.read_text() == RELU
    assert opforge("run", "--backend", "directory", "--ops-directory", "kernels", cwd=tmp_path).returncode == 0


def test_setup_of_nothing_says_so(tmp_path):
    done = opforge("setup", "--suite", "smoke", "--ops", "gelu", cwd=tmp_path)
    assert done.returncode == 5
    assert "no cases for gelu" in done.stderr
    (tmp_path / "file").write_text("")
    assert "cannot be made" in opforge("setup", "--ops-directory", "file", cwd=tmp_path).stderr


def test_version():
    assert opforge("--version").stdout.startswith("opforge ")


@pytest.mark.slow
def test_every_template_is_python():
    from pathlib import Path

    from opforge.backends.scaffold import render
    from opforge.ops import table

    for name in {table().folder_of(op) for op in table()}:
        functions = [
            n.name for n in ast.parse(render(name, Path("kernels"), [])).body if isinstance(n, ast.FunctionDef)
        ]
        assert functions == [f"{table().resolve(name).base}_kernel_impl"]


@pytest.fixture
def weak_suite(tmp_path):
    """Return a suite whose only case has no zeros, so that it is all the same to ``nonzero`` where its input lies in memory."""
    suite = tmp_path / "tiny.txt"
    suite.write_text("Operator: aten.nonzero.default\ncnt: 1, ((T([64], f32),), {})\n")
    return str(suite)


def test_strength_names_what_a_suite_lets_through(tmp_path, weak_suite):
    table = tmp_path / "table.json"
    words = ("strength", "--suite", weak_suite, "--dtypes", "f32", "--save", str(table))
    done = opforge(*words, OPFORGE_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 1, done.stderr
    assert "mutants of ATen on tiny (cpu, f32)" in done.stdout
    assert "nonzero.default" in done.stdout
    assert "kill rate" in done.stdout
    saved = json.loads(table.read_text())
    assert saved["weak"] == {"nonzero.default": ["offset_ignored", "strides_ignored"]}
    assert saved["torch"]


def test_strength_as_json_and_its_threshold(tmp_path, weak_suite):
    words = ("strength", "--suite", weak_suite, "--ops", "nonzero", "--least", "0.1", "--format", "json")
    done = opforge(*words, OPFORGE_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert 0.1 < answer["kill_rate"] < 1
    assert answer["by_mutant"]["zeros"] == {"killed": 1, "mutants": 1}
    survivor = {"op": "nonzero.default", "differed": False, "cases": 1}
    assert answer["survivors"] == [{**survivor, "mutant": name} for name in ("offset_ignored", "strides_ignored")]
    assert not (tmp_path / "strength").exists()  # a selection is not the suite


SPOILER = """
import os, torch

def autoload():
    if os.environ.get("OPFORGE_BACKEND") == "spoiler":
        torch.library.Library("aten", "IMPL").impl("relu", lambda x: x.clamp(min=0) + 7, "CPU", allow_override=True)
"""


@pytest.mark.own_server
@pytest.mark.slow
def test_a_backend_that_the_environment_enables_is_not_the_baseline_of_kernels(tmp_path, kernel_directory):
    site = tmp_path / "site"
    (site / "spoiler-1.0.dist-info").mkdir(parents=True)
    (site / "spoiler.py").write_text(SPOILER)
    (site / "spoiler-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: spoiler\nVersion: 1.0\n")
    (site / "spoiler-1.0.dist-info" / "entry_points.txt").write_text("[torch.backends]\nspoiler = spoiler:autoload\n")
    wrong = "import torch\ndef relu_kernel_impl(x):\n    return torch.where(x > 0, x, torch.zeros_like(x)) + 7\n"
    root = kernel_directory({"relu": wrong})
    words = ("run", "--suite", "smoke", "--backend", "directory", "--ops-directory", str(root))
    done = opforge_process(
        *words,
        "--out",
        str(tmp_path / "run"),
        cwd=tmp_path,
        PYTHONPATH=f"{site}{os.pathsep}{ROOT / 'src'}",
        OPFORGE_BACKEND="spoiler",
    )
    assert done.returncode == 1, done.stderr
    assert "wrong" in done.stdout
    assert "OPFORGE_BACKEND=spoiler is ignored here" in done.stderr


def test_a_full_disk_is_one_line_with_what_is_kept_and_how_to_continue(smoke, tmp_path):
    out = shutil.copytree(smoke[1], tmp_path / "run")
    table = out / "operator_summary.csv"
    table.unlink()
    table.symlink_to("/dev/full")
    full = opforge("run", "--resume", str(out))
    assert full.returncode == 2, full.stderr
    assert full.stderr.splitlines()[-1] == (
        f"opforge: the disk is full (No space left on device); 2 of 2 verdicts are kept in {out}; "
        f"free some space and continue with `opforge run --resume {out}`"
    )
    assert "Traceback" not in full.stderr
    table.unlink()
    again = opforge("run", "--resume", str(out))
    assert again.returncode == 0, again.stderr
    assert table.read_text().startswith("op,")


def test_a_full_disk_under_the_output_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "opforge.cli", "ls", "suites"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.startswith("opforge: the disk is full (No space left on device); free some space")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_report_on_a_run_without_results_says_so(smoke, tmp_path):
    out = shutil.copytree(smoke[1], tmp_path / "run")
    (out / "results.jsonl").write_text("")
    done = opforge("report", str(out))
    assert done.returncode == 5
    assert done.stderr == (
        f"opforge: the run in {out} has no results: none of its 2 cases is judged; "
        f"continue with `opforge run --resume {out}`\n"
    )
