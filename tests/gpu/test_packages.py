"""Packages of `opforge new` on a GPU: both variants pass their own tests there, added operators too, and `opforge check` finds them right."""

from __future__ import annotations

import json
import os

import pytest

from tests.command import opforge
from tests.package.packages import bake, install, run_tests

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=["triton", "cpp"])
def package(request, tmp_path_factory):
    """Return a package with operators added, the folder where it is installed, and what its own tests printed."""
    folder = tmp_path_factory.mktemp(request.param)
    project = bake(folder, f"gpu_{request.param}", "--variant", request.param)
    for name, wishes in {"twice": (), "all_": ("--mutates", "--outputs", "2", "--optional", "bias")}.items():
        done = opforge("add-op", name, *wishes, "--package", str(project))
        assert done.returncode == 0, done.stderr
    target = install(project, folder / "site")
    return project, target, run_tests(project, target, "-vv")


def test_its_own_tests_pass_on_the_device(package):
    _, _, printed = package
    assert "cuda" in printed, "no test ran on the device"
    assert " passed" in printed
    assert "skipped" not in printed


def test_its_operators_are_right_on_the_device(package):
    project, target, _ = package
    path = os.pathsep.join([str(target), os.environ.get("PYTHONPATH", "")])
    done = opforge("check", project.name, "--device", "cuda", "--format", "json", PYTHONPATH=path)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    wrong = {row["name"]: row for row in report["operators"] if row["verdict"] != "passed"}
    assert not wrong, json.dumps(wrong, indent=1)
    assert len(report["operators"]) >= 7
    assert done.returncode == 0
