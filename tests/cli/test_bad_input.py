"""What a user may get wrong: a clear error, the right exit code, and nothing half-written."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.command import opforge


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--suite", "smok"], 2, "unknown suite 'smok'; did you mean 'smoke'?"),
        (["--backend", "atn"], 2, "unknown backend 'atn'; did you mean 'aten'?"),
        (["--executor", "rai"], 2, "unknown executor 'rai'; did you mean 'ray'?"),
        (["--ray-address", "auto"], 2, "--ray-address auto requires --executor ray"),
        (["--executor", "ray", "--ray-address", "head"], 2, "--ray-address 'head' is not auto or HOST:PORT"),
        (["--ops", "rellu"], 2, "unknown operator 'rellu'; did you mean 'relu'"),
        (["--ops", "add.Tensr"], 2, "did you mean 'add.Tensor'"),
        (["--suite", "opinfo", "--dtypes", "bf17"], 2, "unknown dtype 'bf17'; did you mean 'bf16'"),
        (["--device", "gpu"], 2, "unknown device 'gpu'; allowed: cpu, cuda"),
        (["--device", "cuda:x"], 2, "unknown device 'cuda:x'"),
        (["--ops", ""], 2, "--ops is empty"),
        (["--format", "xml"], 2, "unknown format 'xml'"),
        (["--workers", "0"], 2, "--workers 0 is out of range"),
        (["--timeout", "0"], 2, "--timeout 0.0 is out of range; it must be 0.1 to 86,400"),
        (["--timeout", "1e300"], 2, "--timeout 1e+300 is out of range"),
        (["--memory-gib", "inf"], 2, "--memory-gib inf is out of range; it must be 0.25 to 65,536"),
        (["--p", "nan"], 2, "--p nan is out of range; it must be 0 to 1,000"),
        (["--max-mib", "inf"], 2, "--max-mib inf is out of range"),
        (["--backend", "directory", "--ops-directory", "/nowhere"], 2, "there is no kernel directory '/nowhere'"),
        (["--ops", "mm"], 5, "suite 'smoke' has no cases for mm"),
        (["--resume", "/nowhere"], 2, "holds no run"),
        (["--implementation", "relu"], 2, "is not FOLDER=NAME"),
        (["--no-such-option"], 2, "No such option"),
        (["--workers", "two"], 2, "Invalid value for '--workers'"),
        (["--out", "/proc/nope"], 2, "cannot be made"),
    ],
)
def test_run(words, code, message, tmp_path):
    done = opforge("run", *words, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_no_kernel(tmp_path):
    (tmp_path / "kernels" / "relu").mkdir(parents=True)
    done = opforge("run", "--backend", "directory", "--ops-directory", "kernels", cwd=tmp_path)
    assert done.returncode == 5
    assert "no kernel in" in done.stderr


def test_a_folder_that_is_no_operators_is_named(tmp_path):
    folder = tmp_path / "kernels" / "rellu"
    folder.mkdir(parents=True)
    (folder / "rellu_implementation_1.py").write_text("")
    done = opforge("run", "--backend", "directory", "--ops-directory", "kernels", cwd=tmp_path)
    assert done.returncode == 5
    assert "did you mean 'relu'" in done.stderr


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def relu_kernel_impl(self:\n", "SyntaxError"),
        ("x = 1\n", "does not define relu_kernel_impl"),
        ("relu_kernel_impl = 3\n", "is int, not a function"),
        ("def relu_kernel_impl():\n    pass\n", "takes 0 positional arguments"),
    ],
)
def test_a_broken_kernel_file_is_a_verdict(source, words, kernel_directory, tmp_path):
    root = kernel_directory({"relu": source})
    done = opforge("run", "--backend", "directory", "--ops-directory", str(root), "--out", str(tmp_path / "run"))
    assert done.returncode == 1
    assert words in done.stdout
    assert "correctness  0.0000" in done.stdout


def test_an_unknown_kind_of_list():
    done = opforge("ls", "kernel")
    assert done.returncode == 2
    assert "did you mean 'kernels'" in done.stderr


def test_help_needs_no_torch():
    verbs = [[], ["run"], ["time"], ["ls"], ["new"], ["add-op"], ["build"], ["doctor"]]
    code = (
        "import sys\nfrom opforge.cli.main import call\n"
        f"for words in {verbs!r}:\n"
        "    assert call([*words, '--help']) == 0, words\n"
        "    assert not {'numpy', 'pyarrow', 'torch'} & set(sys.modules), words\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage") == len(verbs)


def test_a_device_that_is_not_there(tmp_path):
    import torch

    missing = f"cuda:{torch.cuda.device_count()}"
    done = opforge("run", "--device", missing, cwd=tmp_path)
    assert done.returncode == 2
    assert f"there is no device '{missing}'" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--suite", "opinf"], 2, "unknown suite 'opinf'; did you mean 'opinfo'?"),
        (["--ops", "rellu"], 2, "unknown operator 'rellu'; did you mean 'relu'"),
        (["--dtypes", ","], 2, "--dtypes is empty"),
        (["--least", "2"], 2, "--least 2.0 is out of range"),
        (["--format", "xml"], 2, "unknown format 'xml'"),
        (["--suite", "smoke", "--ops", "mm"], 5, "suite 'smoke' has no cases for mm"),
    ],
)
def test_strength(words, code, message, tmp_path):
    done = opforge("strength", *words, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert message in " ".join(done.stderr.split())
    assert done.stdout == ""
