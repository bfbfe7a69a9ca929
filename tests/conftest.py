"""Fixtures: one warm server for the whole test run, a tiny suite, and directories of kernels."""

from __future__ import annotations

import contextlib
import os
import shutil
import textwrap
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
NOT_PROOFS = shutil.ignore_patterns("*.proof.json*")
"""For copies of examples: other tests judge these examples and write proofs beside them meanwhile."""
os.environ.setdefault("OPFORGE_CACHE", str(ROOT / ".cache" / "opforge"))
os.environ.setdefault("OPFORGE_KEY", str(ROOT / ".cache" / "key"))
# Test workers share the cores, and waiting OpenMP threads would keep these busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")
SHORT_RACE_S = 0.25
"""Seconds of a race in tests that do not depend on a precise time."""
_RACE_VARIABLE = "OPFORGE_RACE_SECONDS"

from opforge import registry  # noqa: E402
from opforge.cases import Case, Phase  # noqa: E402
from opforge.models.judge import MODEL_ROLES  # noqa: E402
from opforge.runs import RunConfig, run  # noqa: E402
from opforge.runs.execute.judge_pool import device_settings, start_server  # noqa: E402
from opforge.runs.pipeline import RunResult  # noqa: E402
from opforge.sandbox.host.client import SERVER_VARIABLE, ForkServerHandle  # noqa: E402
from opforge.sandbox.host.warm import warm_server  # noqa: E402
from opforge.suites import LoadedSuite, SuiteOptions  # noqa: E402
from opforge.suites.base import Progress, no_progress  # noqa: E402
from tests.entries import ENTRIES  # noqa: E402

pytest_plugins = ["tests.scheduling"]


def pytest_configure(config: pytest.Config) -> None:
    """Start one warm server for this run and all its workers; it imports torch while tests are collected."""
    os.environ.pop("PYTEST_ADDOPTS", None)  # read by now; tests run pytest too, with options of their own
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        stack = contextlib.ExitStack()
        path, _server = stack.enter_context(warm_server("", MODEL_ROLES, device_settings("cpu")))
        os.environ[SERVER_VARIABLE] = path
        config.add_cleanup(stack.close)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let quick tests record a few entries of OpInfo, and slow tests all of them; keep races short on a CPU."""
    if item.get_closest_marker("gpu"):
        os.environ.pop(_RACE_VARIABLE, None)
    else:
        os.environ[_RACE_VARIABLE] = str(SHORT_RACE_S)
    if item.get_closest_marker("slow"):
        os.environ.pop("OPFORGE_OPINFO_ENTRIES", None)
    else:
        os.environ["OPFORGE_OPINFO_ENTRIES"] = ",".join(ENTRIES)


def slow(*values: Any, **options: Any) -> Any:
    """Return the parameters of a test that runs in the slow set."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


class TinySuite:
    """A few cases of each of some operators."""

    name = "tiny"
    cases: Mapping[str, list[str]] = {}
    performance = False

    def load(self, options: SuiteOptions, progress: Progress = no_progress) -> LoadedSuite:
        chosen = {op: texts for op, texts in self.cases.items() if options.ops is None or op in options.ops}
        made = {op: [Case.make(op, text) for text in texts] for op, texts in chosen.items()}
        if self.performance:
            for op, texts in chosen.items():
                made[op].append(Case.make(op, texts[0], phase=Phase.PERFORMANCE))
        return LoadedSuite(self.name, made)


def _limits(fields: Mapping[str, Any]) -> dict[str, float]:
    """Return the limits of a run in tests; on a GPU, a race has its usual time."""
    return {"timeout_s": 5.0} | ({} if fields.get("device") == "cuda" else {"race_s": SHORT_RACE_S})


UNARY = ["((T([3, 4], f32),), {})", "((T([5], f32),), {})", "((T([4, 3], f32, stride=(1, 4)),), {})"]


@pytest.fixture
def kernel_directory(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    """Return a function that writes a directory of kernels from sources by operator."""

    def write(sources: dict[str, str]) -> Path:
        root = tmp_path / "kernels"
        for name, source in sources.items():
            folder = root / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}_implementation_1.py").write_text(textwrap.dedent(source))
        return root

    return write


@pytest.fixture(scope="session")
def shared_server() -> Iterator[ForkServerHandle]:
    """Return a line to the warm server of this test run."""
    server = start_server("cpu")
    yield server
    server.close()


@pytest.fixture(autouse=True)
def _own_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test that is marked so start a server itself: it looks at the server's processes, or at its environment."""
    if request.node.get_closest_marker("own_server") is not None:
        monkeypatch.delenv(SERVER_VARIABLE)


@pytest.fixture
def judge_tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RunResult]]:
    """Return a function that judges a directory of kernels on given cases, in the real sandbox."""
    monkeypatch.setitem(registry.BUILTIN["suites"], "tiny", f"{__name__}:TinySuite")
    registry._entries.cache_clear()

    def judge(
        directory: Path | None, cases: Mapping[str, list[str]], *, performance: bool = False, **fields: Any
    ) -> RunResult:
        monkeypatch.setattr(TinySuite, "cases", cases)
        monkeypatch.setattr(TinySuite, "performance", performance)
        backend = "aten" if directory is None else "directory"
        config = RunConfig("tiny", backend, ops_directory=str(directory), **{**_limits(fields), **fields})
        return run(config, tmp_path / "run")

    yield judge
    registry._entries.cache_clear()


def verdicts(ended: RunResult) -> dict[str, set[tuple[str, str]]]:
    """Return verdict and reason of every case, by operator."""
    found: dict[str, set[tuple[str, str]]] = {}
    for row in ended.store.rows():
        found.setdefault(row.op, set()).add((row.verdict, row.reason))
    return found


@pytest.fixture
def still_running(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Return a function that finds the processes of this test's own servers, and all that came of them."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("OPFORGE_TEST_MARK", mark)

    def find() -> list[int]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and process.environ().get("OPFORGE_TEST_MARK") == mark:
                    found.append(process.pid)
        return found

    return find


@pytest.fixture
def custom_root(tmp_path: Path) -> Callable[[dict[str, dict[str, str]]], Path]:
    """Return a function that writes a folder of custom operators from sources by operator and file."""

    def write(sources: dict[str, dict[str, str]]) -> Path:
        root = tmp_path / "custom"
        for op, files in sources.items():
            (root / op).mkdir(parents=True, exist_ok=True)
            for name, source in files.items():
                (root / op / name).write_text(textwrap.dedent(source))
        return root

    return write


@pytest.fixture
def judge_custom(tmp_path: Path, custom_root: Callable[..., Path]) -> Callable[..., RunResult]:
    """Return a function that judges all implementations of custom operators, in the real sandbox."""

    def judge(sources: dict[str, dict[str, str]], **fields: Any) -> RunResult:
        root = str(custom_root(sources))
        config = RunConfig("custom_ops", "custom_ops", custom_ops_root=root, **{**_limits(fields), **fields})
        return run(config, tmp_path / "run")

    return judge


def gen_input(*correctness: str, performance: str = "") -> str:
    """Return the source of a gen_input.py with these tests."""
    return (
        "import torch\nfrom opforge import Test\n"
        f"def get_correctness_tests():\n    return [{', '.join(correctness)}]\n"
        f"def get_performance_tests():\n    return [{performance}]\n"
    )


def by_kernel(ended: RunResult) -> dict[str, set[tuple[str, str]]]:
    """Return verdict and reason of every case, by kernel."""
    found: dict[str, set[tuple[str, str]]] = {}
    for row in ended.store.rows():
        found.setdefault(row.kernel, set()).add((row.verdict, row.reason))
    return found
