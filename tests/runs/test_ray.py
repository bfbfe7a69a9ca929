"""A Ray cluster of three nodes on this machine: the same verdicts as without, whatever is lost on the way."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from opforge import registry
from opforge.backends.custom_ops import CustomOpsBackend
from opforge.backends.directory import DirectoryBackend
from opforge.cases import Case, Phase
from opforge.errors import OpforgeError
from opforge.runs import RunConfig, run
from opforge.runs.execute.ray import connect
from opforge.runs.execute.ray import executor as cluster_executor
from opforge.runs.execute.ray.executor import TASKS, RayCluster
from opforge.runs.execute.ray.placement import KERNELS_PER_GPU, TASKS_PER_SLOT, Node, Placement, TaskRequest
from opforge.runs.execute.ray.scheduler import MAX_LOSSES, Scheduler
from opforge.runs.rows import ResultRow
from opforge.runs.store import read_rows
from opforge.suites.given import GivenSuite
from opforge.suites.lookup import find_suite
from tests.command import opforge_process
from tests.conftest import ROOT, gen_input
from tests.runs.test_resume import wait_for_lines

pytest.importorskip("ray")

BODIES = {
    "abs": "torch.where(self < 0, -self, self + 0)",
    "neg": "-1 * self",
    "relu": "torch.where(self <= 0, 0, self)",
    "square": "self * self",
}
HONEST = "import torch\ndef {op}_kernel_impl(self):\n    return {body}\n"
SLOW = "import time, torch\ndef {op}_kernel_impl(self):\n    time.sleep(0.05)\n    return {body}\n"
KILLS = """
    import os
    def neg_kernel_impl(self):
        server = os.getppid()
        with open(f"/proc/{server}/stat") as stat:
            above = int(stat.read().rpartition(")")[2].split()[1])
        os.kill(above, 9)
        return -1 * self
"""


class Nodes:
    """The cluster: a head without CPUs, a node, and for tests that ask for it a second; what a node keeps is kept apart from what this process keeps."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "cache"
        self._folder = folder
        connect.load_ray()
        from ray.cluster_utils import Cluster

        self.cluster = Cluster()
        self._add(num_cpus=0, include_dashboard=False)
        self._add(num_cpus=2, num_gpus=2)
        self.cluster.wait_for_nodes()
        self.spare = None

    def _add(self, **has: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OPFORGE_CACHE", str(self.cache))
            patch.setenv("OPFORGE_TEST_MARK", str(self._folder))
            patch.setenv(
                "RAY_worker_niceness", "0"
            )  # beside busy programs, Ray's low priority makes minutes of seconds
            return self.cluster.add_node(object_store_memory=100 << 20, **has)

    def lose(self) -> None:
        self.cluster.remove_node(self.spare, allow_graceful=False)
        self.spare = None

    def mend(self) -> None:
        if self.spare is None:
            self.spare = self._add(num_cpus=1, num_gpus=1)
            self.cluster.wait_for_nodes()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nodes")
    made = Nodes(folder)
    ray = connect.load_ray()
    connect.connect(ray, made.cluster.address)
    yield made
    ray.shutdown()
    made.cluster.shutdown()
    assert_nothing_runs(str(folder))


@pytest.fixture
def two_nodes(nodes):
    nodes.mend()
    return nodes


def assert_nothing_runs(mark: str) -> None:
    """Wait for what is ending to be gone; what stays is an error."""
    until = time.monotonic() + 30
    while (left := [p for p in psutil.process_iter() if _mark(p) == mark]) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left


def _mark(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("OPFORGE_TEST_MARK")
    except psutil.Error:
        return None


def cases(op: str, count: int, *, timed: bool = False) -> list[Case]:
    made = [Case.make(f"{op}.default", f"((T([{n + 2}, 3], f32),), {{}})") for n in range(count)]
    return made + ([Case.make(f"{op}.default", "((T([32, 33], f32),), {})", phase=Phase.PERFORMANCE)] if timed else [])


def judged(root: Path, out: Path, suite: GivenSuite, progress: Any = None, **fields: Any) -> list[dict[str, Any]]:
    """Return the lines of a run, each of which is there once."""
    config = RunConfig("given", "directory", ops_directory=str(root), **{"timeout_s": 20.0, **fields})
    more = {} if progress is None else {"progress": progress}
    run(config, out, suite=suite, backend=DirectoryBackend(config.backend_options), **more)
    rows = list(read_rows(out))
    assert max(Counter((r.kernel, r.op, r.id, r.phase) for r in rows).values()) == 1
    return rows


def outcomes(rows: list[ResultRow]) -> set[tuple[str, ...]]:
    return {(r.kernel, r.op, r.id, r.phase, r.verdict, r.reason) for r in rows}


def tasks(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / TASKS).read_text().splitlines()]


def on_ray(**fields: Any) -> dict[str, Any]:
    return {"executor": "ray", "workers": RayCluster.default_workers, **fields}


def assert_one_at_a_time(record: list[dict[str, Any]], where: Any) -> None:
    """No two timings have the same place at the same time."""
    places = defaultdict(list)
    for task in record:
        if task["phase"] == "performance":
            places[where(task)].append((task["began"], task["ended"]))
    assert places
    for spans in places.values():
        spans.sort()
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))


@pytest.mark.parametrize("ops", [("abs", "neg", "exp"), pytest.param((), marks=pytest.mark.slow, id="all")])
def test_the_verdicts_are_those_of_a_single_machine(ops, nodes, request, kernel_directory, tmp_path):
    sources = {op: HONEST.format(op=op, body=body) for op, body in BODIES.items()}
    sources["neg"] = "import helper\ndef neg_kernel_impl(self):\n    return helper.negative(self)\n"
    sources["sign"] = HONEST.format(op="sign", body="self")
    sources["sin"] = "import torch\ndef sin_kernel_impl(self):\n    return torch.sin(self)\n"
    sources["exp"] = "import os\ndef exp_kernel_impl(self):\n    os.abort()\n"
    sources["cos"] = "def cos_kernel_impl(self):\n    raise ValueError(__file__)\n"
    if not ops:
        request.getfixturevalue("two_nodes")
    sources = {op: f"# of {len(ops)}\n{source}" for op, source in sources.items() if not ops or op in ops}
    root = kernel_directory(sources)
    (root / "neg" / "helper.py").write_text("def negative(x):\n    return -1 * x\n")
    suite = GivenSuite([*cases("abs", 5, timed=True), *(c for op in sources if op != "abs" for c in cases(op, 5))])
    local = judged(root, tmp_path / "local", suite)
    shipped = nodes.cache / "shipped" / "kernels"
    earlier = set(shipped.iterdir()) if shipped.exists() else set()
    there = judged(root, tmp_path / "ray", suite, **on_ray())
    assert outcomes(there) == outcomes(local)
    assert len({r.verdict for r in there}) >= (2 if ops else 4)
    assert str(nodes.cache) not in (tmp_path / "ray" / "results.jsonl").read_text()
    assert len(set(shipped.iterdir()) - earlier) == len(sources)
    record = tasks(tmp_path / "ray")
    assert {t["end"] for t in record} == {"done"}
    assert_one_at_a_time(record, lambda task: task["node"])


@pytest.mark.slow
def test_references_and_stored_tensors_are_shipped(nodes, custom_root, tmp_path):
    root = custom_root({
        "double": {
            "gen_input.py": gen_input("Test(lambda: torch.arange(12.0).reshape(3, 4))", "Test(lambda: torch.ones(5))"),
            "double_reference.py": "def double_reference(x):\n    return x * 2\n",
            "double_good.py": "def double_kernel_impl(x):\n    return x + x\n",
            "double_bad.py": "def double_kernel_impl(x):\n    return x + 1\n",
        }
    })  # fmt: skip
    found = []
    for name, fields in (("local", {}), ("ray", on_ray())):
        config = RunConfig("custom_ops", "custom_ops", custom_ops_root=str(root), timeout_s=20.0, **fields)
        backend = CustomOpsBackend(config.backend_options)
        run(config, tmp_path / name, suite=find_suite("custom_ops"), backend=backend)
        found.append(outcomes(list(read_rows(tmp_path / name))))
    assert found[0] == found[1]
    assert Counter(row[4] for row in found[1]) == {"passed": 2, "wrong": 2}
    assert len(list((nodes.cache / "shipped" / "blobs").glob("*.safetensors"))) == 1


@pytest.mark.slow
def test_a_kernel_that_kills_its_ray_worker_is_tried_three_times(nodes, kernel_directory, tmp_path):
    root = kernel_directory({"neg": KILLS, "abs": HONEST.format(op="abs", body=BODIES["abs"])})
    suite = GivenSuite([*cases("abs", 3, timed=True), *cases("neg", 3, timed=True)])
    rows = judged(root, tmp_path / "run", suite, **on_ray(confine=False))
    assert {(r.op, r.verdict) for r in rows} == {("abs.default", "passed"), ("neg.default", "crashed")}
    assert all("died 3 times" in r.reason for r in rows if r.verdict == "crashed")
    ends = Counter((t["kernel"], t["end"]) for t in tasks(tmp_path / "run"))
    assert ends == {("neg_implementation_1", "lost"): MAX_LOSSES, ("abs_implementation_1", "done"): 2}


@pytest.mark.slow
def test_a_lost_node_loses_no_case_and_judges_none_twice(two_nodes, kernel_directory, tmp_path, monkeypatch):
    flows: list[Scheduler] = []
    take = Scheduler._receive_message

    def watched(flow: Scheduler, flying: Any) -> None:
        take(flow, flying)
        running = [t.record["node"] for t in flow._running.values() if "began" in t.record and t.pending]
        if not flows and two_nodes.spare.node_id in running:
            flows.append(flow)
            two_nodes.lose()

    monkeypatch.setattr(Scheduler, "_receive_message", watched)
    root = kernel_directory({op: SLOW.format(op=op, body=body) for op, body in BODIES.items()})
    suite = GivenSuite([case for op in BODIES for case in cases(op, 12)])
    rows = judged(root, tmp_path / "run", suite, **on_ray())
    assert Counter(r.verdict for r in rows) == {"passed": 12 * len(BODIES)}
    assert [t["end"] for t in tasks(tmp_path / "run")].count("lost") >= 1


class FakeGpus(RayCluster):
    """Asks for GPUs, and judges on the CPU."""

    def __init__(self, config: RunConfig, server: Any = None) -> None:
        super().__init__(config, server, Placement(gpu=True))


@pytest.mark.slow
def test_no_two_timings_share_a_gpu(two_nodes, kernel_directory, tmp_path, monkeypatch):
    monkeypatch.setitem(registry.BUILTIN["executors"], "ray", f"{__name__}:FakeGpus")
    registry._entries.cache_clear()
    root = kernel_directory({op: HONEST.format(op=op, body=body) for op, body in BODIES.items()})
    suite = GivenSuite([case for op in BODIES for case in cases(op, 2, timed=True)])
    try:
        rows = judged(root, tmp_path / "run", suite, **on_ray())
    finally:
        registry._entries.cache_clear()
    assert {r.verdict for r in rows} == {"passed"}
    record = tasks(tmp_path / "run")
    assert len([t for t in record if t["phase"] == "performance"]) == len(BODIES)
    assert all(len(t["gpus"]) == 1 for t in record)
    assert_one_at_a_time(record, lambda task: (task["node"], task["gpus"][0]))


def test_places_by_kind_of_device():
    head, one, two = Node("a", "", 0, 0), Node("b", "", 4, 0), Node("c", "", 16, 8)
    cpu, gpu = Placement(gpu=False), Placement(gpu=True)
    every = [head, one, two]
    assert cpu.usable(every) == [one, two]
    assert gpu.usable(every) == [two]
    assert (cpu.slots(every, Phase.CORRECTNESS), cpu.slots(every, Phase.PERFORMANCE)) == (20, 2)
    assert (gpu.slots(every, Phase.CORRECTNESS), gpu.slots(every, Phase.PERFORMANCE)) == (16, 8)
    assert cpu.max_tasks(every, Phase.CORRECTNESS, 1000) == 20 * TASKS_PER_SLOT
    assert cpu.max_tasks(every, Phase.CORRECTNESS, 3) == 3
    assert cpu.request(every, Phase.PERFORMANCE, Counter({"b": 1})) == TaskRequest(16.0, node="c", pinned=True)
    assert cpu.request(every, Phase.PERFORMANCE, Counter(), "c") == TaskRequest(16.0, node="c", pinned=True)
    assert cpu.request(every, Phase.PERFORMANCE, Counter({"b": 1, "c": 1})) is None
    assert gpu.request(every, Phase.PERFORMANCE, Counter()) == TaskRequest(1.0, 1.0)
    assert gpu.request(every, Phase.CORRECTNESS, Counter(), "c") == TaskRequest(1.0, 1.0 / KERNELS_PER_GPU, "c")


@pytest.mark.slow
def test_other_versions_on_a_node_are_named(nodes, monkeypatch, kernel_directory, tmp_path):
    ours = {**connect.versions(), "torch": "2.99.0"}
    monkeypatch.setattr(cluster_executor, "versions", lambda: ours)
    root = kernel_directory({"abs": HONEST.format(op="abs", body=BODIES["abs"])})
    with pytest.raises(OpforgeError, match=r"node .* has torch .*, and here it is 2\.99\.0; install the same"):
        judged(root, tmp_path / "run", GivenSuite(cases("abs", 1)), **on_ray())
    assert not (tmp_path / "run").exists()


def test_another_version_of_ray_is_named():
    def init(**_options: Any) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.1.0\n    Python: 3.9.1\n")

    with pytest.raises(OpforgeError, match=r"started with: Ray: 2\.1\.0 Python: 3\.9\.1; install the same on all"):
        connect.connect(SimpleNamespace(init=init), "auto")


def test_no_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OpforgeError, match=r"pip install 'opforge\[ray\]'"):
        RayCluster(RunConfig("smoke", "aten", **on_ray()))


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:", "127.0.0.1:99999", "ray://127.0.0.1:10001"])
def test_what_is_no_address(address):
    with pytest.raises(OpforgeError, match="HOST:PORT"):
        connect.connect(None, address)


def test_nothing_at_an_address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        done = opforge_process("run", "--suite", "smoke", "--executor", "ray", "--ray-address", address)
    assert done.returncode == 2
    assert f"nothing answers at --ray-address {address}" in done.stderr
    assert not done.stdout


def test_something_else_at_an_address(monkeypatch):
    monkeypatch.setattr(connect, "_ANSWER_S", 2.0)
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(OpforgeError, match="is not the head of a Ray cluster"),
    ):
        connect.connect(None, f"127.0.0.1:{other.getsockname()[1]}")


def test_an_address_without_ray_and_a_device_with_it():
    with pytest.raises(OpforgeError, match="requires --executor ray"):
        RunConfig("smoke", "aten", ray_address="auto").checked()
    with pytest.raises(OpforgeError, match="use --device cuda"):
        RayCluster(RunConfig("smoke", "aten", device="cuda:1", **on_ray()))


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_running_and_the_rest_is_judged_without_ray(tmp_path, custom_root):
    slow = """
        import os, time
        # put together, for a file that is named would be part of the source
        pause = 0.3 if os.path.exists(os.path.join(os.path.dirname(__file__), "slow" + ".txt")) else 0
        def double_kernel_impl(x):
            time.sleep(pause)
            return x + x
    """
    root = custom_root({
        "double": {
            "gen_input.py": gen_input(*(f"Test(lambda: torch.ones({n + 1}, 3))" for n in range(6))),
            "double_reference.py": "def double_reference(x):\n    return x * 2\n",
            "slow.txt": "",
            **{f"double_{n}.py": textwrap.dedent(slow) for n in range(6)},
        }
    })  # fmt: skip
    out = tmp_path / "run"
    words = ["--suite", "custom_ops", "--backend", "custom_ops", "--custom-ops-root", str(root), "--executor", "ray"]
    process = subprocess.Popen(
        [sys.executable, "-m", "opforge.cli", "run", *words, "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "OPFORGE_TEST_MARK": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  # background jobs ignore it
    )
    wait_for_lines(out / "results.jsonl", 1, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    said, complained = process.communicate(timeout=60)
    assert process.returncode == 130, complained.decode()
    assert (said, b"--resume" in complained) == (b"", True)
    assert_nothing_runs(str(tmp_path))

    before = list(read_rows(out))
    assert 0 < len(before) < 36
    (root / "double" / "slow.txt").unlink()
    assert opforge_process("run", "--resume", str(out)).returncode == 0
    rows = list(read_rows(out))
    assert rows[: len(before)] == before
    assert len({(r.kernel, r.id) for r in rows}) == len(rows) == 36
