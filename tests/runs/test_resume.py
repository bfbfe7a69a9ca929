"""A run that is killed, taken up again, or started twice."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from opforge.errors import RunDirectoryError
from opforge.runs.store import RunStore, read_rows
from tests.command import opforge
from tests.conftest import ROOT, slow

OPS = "where,eq,ne,le,ge,lt,gt,sum,mul,add,any,all,masked_fill,masked_select,logical_and,logical_or,logical_xor,clone,expand,view"
WHOLE = ["run", "--suite", "opinfo", "--backend", "aten", "--dtypes", "bool"]
WORDS = [*WHOLE, "--ops", OPS]


def start(out: Path, words: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "opforge.cli", *words, "--out", str(out)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a running process has written this many verdicts."""
    while process.poll() is None:
        try:
            with path.open("rb") as handle:
                if sum(1 for _ in handle) >= count:
                    return
        except FileNotFoundError:
            pass
        time.sleep(0.01)  # the run needs the cores
    pytest.fail("the run ended before it was interrupted")


@pytest.fixture(scope="module", autouse=True)
def recorded():
    """Have the suite in the cache, so that the runs below judge from their first second."""
    assert opforge("ls", "ops", "--suite", "opinfo", "--dtypes", "bool").returncode == 0


@pytest.mark.parametrize(("lines", "words"), [(100, [*WHOLE, "--ops", "where,eq,add,any,view"]), slow(500, WORDS)])
def test_kill_halfway_then_resume_loses_nothing_and_judges_nothing_twice(tmp_path, lines, words):
    out = tmp_path / "run"
    process = start(out, words)
    wait_for_lines(out / "results.jsonl", lines, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with (out / "results.jsonl").open("a") as handle:
        handle.write('{"op": "add.Ten')  # what a process killed in the middle of a line leaves
    before = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()[:-1]]
    planned = json.loads((out / "manifest.json").read_text())["plan"]["cases"]
    assert 0 < len(before) < planned

    done = opforge("run", "--resume", str(out), "--format", "json")
    assert done.returncode == 0, done.stderr
    rows = list(read_rows(out))
    assert [row.wire() for row in rows[: len(before)]] == before
    keys = [(row.op, row.id, row.phase) for row in rows]
    assert len(keys) == len(set(keys)) == planned
    assert json.loads(done.stdout)["scores"]["cases"] == planned


@pytest.mark.parametrize(("ending", "code"), [slow(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_keeps_what_was_judged_and_says_how_to_go_on(tmp_path, ending, code):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "opforge.cli", *WORDS, "--out", str(out)]
    heeded = functools.partial(signal.signal, ending, signal.SIG_DFL)  # a shell's background jobs ignore it
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heeded,  # noqa: PLW1509  # no threads here
    )
    wait_for_lines(out / "results.jsonl", 200, process)
    process.send_signal(ending)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert f"opforge run --resume {out}" in said
    assert "Traceback" not in said
    assert '"word":"interrupted"' in (out / "report.html").read_text()
    assert opforge("run", "--resume", str(out)).returncode == 0


@pytest.mark.slow
def test_two_runs_into_one_folder_the_second_refuses(tmp_path):
    out = tmp_path / "run"
    process = start(out, WHOLE)
    try:
        wait_for_lines(out / "results.jsonl", 10, process)
        for words in ([*WHOLE, "--out", str(out)], ["run", "--resume", str(out)]):
            second = opforge(*words)
            assert second.returncode == 2
            assert "another run is writing to" in second.stderr
    finally:
        process.kill()
        process.wait()


SMOKE = ("run", "--suite", "smoke", "--backend", "aten", "--out")


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """Return the folder of a run that has ended."""
    out = tmp_path_factory.mktemp("smoke") / "run"
    assert opforge(*SMOKE, str(out)).returncode == 0
    return out


@pytest.fixture
def finished(smoke, tmp_path):
    """Return a copy of that folder."""
    return Path(shutil.copytree(smoke, tmp_path / "run"))


def test_a_finished_folder_is_not_written_over(finished):
    kept = (finished / "results.jsonl").read_bytes()
    again = opforge(*SMOKE, str(finished))
    assert again.returncode == 2
    assert "--resume" in again.stderr
    assert (finished / "results.jsonl").read_bytes() == kept
    resumed = opforge("run", "--resume", str(finished))
    assert resumed.returncode == 0
    assert (finished / "results.jsonl").read_bytes() == kept


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 7, 40])
def test_a_truncated_results_file_is_mended(finished, cut):
    contents = (finished / "results.jsonl").read_bytes()
    (finished / "results.jsonl").write_bytes(contents[:-cut])
    assert opforge("run", "--resume", str(finished)).returncode == 0
    rows = list(read_rows(finished))
    assert len({row.id for row in rows}) == len(rows) == 2


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    good = '{"op": "a.x", "kernel": "k", "verdict": "passed"}\n'
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "results.jsonl").write_text(f'{good}{{"op"\n{good}')
    with pytest.raises(RunDirectoryError, match="line 2"):
        list(read_rows(tmp_path / "run"))


def test_resume_refuses_other_settings_and_changed_kernels(tmp_path, kernel_directory):
    root = kernel_directory(
        {"relu": "import torch\ndef relu_kernel_impl(self):\n    return torch.where(self <= 0, 0, self)\n"}
    )
    out = tmp_path / "run"
    words = ("run", "--suite", "smoke", "--backend", "directory", "--ops-directory", str(root), "--out", str(out))
    assert opforge(*words).returncode == 0
    other = opforge("run", "--resume", str(out), "--suite", "opinfo")
    assert other.returncode == 2
    assert "--suite cannot be combined with --resume" in other.stderr
    source = root / "relu" / "relu_implementation_1.py"
    source.write_text(source.read_text() + "\n")
    changed = opforge("run", "--resume", str(out))
    assert changed.returncode == 2
    assert "has changed since the run started" in changed.stderr


def test_the_lock_goes_with_the_process(tmp_path):
    code = (
        "import os; from pathlib import Path; from opforge.runs.manifest import Manifest;"
        "from opforge.runs.store import RunStore;"
        "about = {'config': {}, 'plan': {'operators': 0, 'missing': [], 'optional': []}};"
        f"RunStore.create(Path({str(tmp_path / 'run')!r}), Manifest.from_wire(about)); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code], check=False)
    assert killed.returncode == -signal.SIGKILL
    RunStore.reopen(tmp_path / "run").close()
    assert os.listdir(tmp_path / "run")
