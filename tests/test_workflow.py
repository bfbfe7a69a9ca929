"""The example workflow gates a repository of kernels: its commands are run here, on a repository with a pull request."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT

WORKFLOW = ROOT / "examples" / "github" / "kernels.yml"
RIGHT = "import torch\n\n\ndef relu_kernel_impl(self):\n    return torch.clamp_min(self, 0)\n"
WRONG = RIGHT.replace("self, 0)", "self, 0.5)")


def steps() -> dict[str, dict[str, Any]]:
    """Return the steps that have commands, by name."""
    (job,) = yaml.safe_load(WORKFLOW.read_text())["jobs"].values()
    return {step["name"]: step for step in job["steps"] if "run" in step}


def test_the_workflow_is_one_that_github_takes():
    workflow = yaml.safe_load(WORKFLOW.read_text())
    assert workflow[True] == "pull_request"  # YAML reads `on` as true
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert all(("run" in step) != ("uses" in step) for step in job["steps"])
    assert list(steps()) == ["Install", "Judge the base branch", "Judge the pull request", "Compare"]


def test_nothing_of_the_pull_request_is_pasted_into_a_command():
    assert all("${{" not in step["run"] for step in steps().values())


def git(folder: Path, *words: str) -> None:
    identity = (
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b",
        "-c",
        "init.defaultBranch=main",
        "-c",
        "commit.gpgsign=false",
    )
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def pull_request(tmp_path: Path):
    """Return a function that makes a clone with a pull request, and one that runs a step in it."""

    def make(source: str):
        origin, clone = tmp_path / "origin", tmp_path / "clone"
        file = Path("kernels/relu/relu_implementation_1.py")
        (origin / file).parent.mkdir(parents=True)
        git(origin, "init", "-q")
        (origin / file).write_text(RIGHT)
        git(origin, "add", ".")
        git(origin, "commit", "-qm", "base")
        git(tmp_path, "clone", "-q", str(origin), str(clone))
        (clone / file).write_text(source)
        git(clone, "commit", "-qam", "pull request", "--allow-empty")

        commands = tmp_path / "bin"
        commands.mkdir()
        (commands / "opforge").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m opforge.cli "$@"\n')
        (commands / "opforge").chmod(0o755)
        given = yaml.safe_load(WORKFLOW.read_text())["env"]
        path = os.pathsep.join([str(commands), os.environ["PATH"]])
        places = {"RUNNER_TEMP": str(tmp_path), "GITHUB_WORKSPACE": str(clone), "BASE_REF": "main"}
        more = {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"), "PATH": path, "PYTHONPATH": str(ROOT / "src")}

        def run(name: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                ["bash", "-e", "-o", "pipefail", "-c", steps()[name]["run"]],
                cwd=clone,
                env={**os.environ, **given, **places, **more},
                capture_output=True,
                text=True,
                check=False,
            )

        return run

    return make


@pytest.mark.slow
def test_a_wrong_kernel_makes_the_pull_request_red(pull_request, tmp_path):
    run = pull_request(WRONG)
    done = run("Judge the base branch")
    assert done.returncode == 0, done.stderr
    done = run("Judge the pull request")
    assert done.returncode == 1, done.stderr
    (error,) = [line for line in done.stdout.splitlines() if line.startswith("::error ")]
    assert "file=kernels/relu/relu_implementation_1.py,title=relu.default (relu_implementation_1) failed" in error
    assert run("Compare").returncode == 1
    summary = (tmp_path / "summary.md").read_text()
    assert "| became wrong | `relu.default` | right |" in summary
    assert "❌" in summary


@pytest.mark.slow
def test_the_same_kernels_stay_green(pull_request, tmp_path):
    run = pull_request(RIGHT)
    for name in ("Judge the base branch", "Judge the pull request", "Compare"):
        done = run(name)
        assert done.returncode == 0, (name, done.stdout, done.stderr)
    assert "✅ no regression" in (tmp_path / "summary.md").read_text()
