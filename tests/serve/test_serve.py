"""`opforge serve` over loopback: verdicts, limits, hostile clients, and what a killed server loses, which is nothing."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest

import opforge
from opforge.errors import OpforgeError
from opforge.runs.rows import ResultRow
from opforge.serve.fair_queue import FairQueue
from opforge.serve.judge_request import JudgeRequest
from opforge.serve.request_store import RequestStore, StoredRequest
from opforge.serve.reward import reward
from opforge.serve.tokens import Tokens
from tests.command import opforge as opforge_command
from tests.conftest import ROOT
from tests.exploits.table import CPU
from tests.serve.serving import CASE, OTHER, RELU, WRONG, Server, serving

ANA, BEN = "ana-has-this-token", "ben-has-another-one"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    (folder / "tokens").write_text(f"ana {ANA}  # the first\n\nben {BEN}\n")
    words = ("--tokens", str(folder / "tokens"), "--max-body-kib", "64", "--timeout", "10")
    with serving(folder / "data", *words) as running:
        running.data = folder / "data"
        yield running


@pytest.fixture
def ana(server):
    with opforge.Client(server.url, token=ANA) as client:
        yield client


def post(server: Server, body: object, token: str = ANA, wait: int = 60) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.post(f"{server.url}/judge?wait={wait}", json=body, headers=headers, timeout=120)


def test_a_right_kernel_gets_its_reward_its_proof_and_a_run_that_can_be_reported(server, ana):
    judged = ana.judge("relu", RELU, cases=[CASE], timed_cases=[OTHER], reward="speed")
    assert (judged.right, judged.reward) == (True, 1.0), "right, and slower than ATen"
    assert judged.feedback["scores"]["verdicts"] == {"passed": 3}
    assert judged.feedback["times"][0]["speedup"] > 0
    assert list(judged.proof["operators"]) == ["relu.default"]
    done = opforge_command("report", str(server.data / "runs" / judged.id[:2] / judged.id / "run"))
    assert done.returncode == 0, done.stderr
    assert "relu.default" in done.stdout
    again = ana.judge("relu", RELU, cases=[CASE], timed_cases=[OTHER], reward="speed")
    assert again == judged, "answered from the store: not judged again"


def test_a_wrong_kernel_gets_none_and_the_reason(ana):
    judged = ana.judge("relu", WRONG, cases=[CASE, OTHER], timed=False)
    assert (judged.right, judged.reward, judged.proof) == (False, 0.0, None)
    assert "elements" in judged.feedback["failures"][0]["reason"]


def test_a_call_that_aten_refuses_must_be_refused(ana):
    source = "def add_kernel_impl(self, other, *, alpha=1):\n    return self\n"
    judged = ana.judge("add", source, refused_cases=["((T([3], f32), T([4], f32)), {})"], timed=False)
    assert not judged.right
    (failure,) = judged.feedback["failures"]
    assert "ATen" in failure["reason"]


def test_without_cases_the_suite_of_the_server_has_them(ana):
    assert ana.judge("relu", RELU, timed=False).feedback["scores"]["cases"] == 1
    with pytest.raises(OpforgeError, match="suite 'smoke' of this server has no case for tanh"):
        ana.judge("tanh", RELU.replace("relu", "tanh"))


def test_a_kernel_reaches_neither_the_server_nor_what_others_sent(server, ana):
    source = f"""
        import os, socket, torch
        def relu_kernel_impl(self):
            for path in ({str(server.data)!r}, {str(server.data / "requests.sqlite")!r}):
                try:
                    open(path).read() if os.path.isfile(path) else os.listdir(path)
                except OSError:
                    continue
                return self
            try:
                socket.create_connection(("127.0.0.1", {server.url.rpartition(":")[2]}))
            except OSError:
                return torch.where(self <= 0, 0, self)
            return self
    """
    judged = ana.judge("relu", re.sub(r"^        ", "", source, flags=re.MULTILINE), cases=[CASE])
    assert (judged.right, judged.reward) == (False, 0.0)
    (failure,) = judged.feedback["failures"]
    assert failure["verdict"] == "cheated"
    assert "all of it was blocked" in failure["reason"]


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"op": "rellu"}, 400, "did you mean 'relu'"),
        ({"op": "../../etc/passwd"}, 400, "unknown operator"),
        ({"source": " "}, 400, "source is empty"),
        ({"cases": ["("]}, 400, "not a case"),
        ({"cases": ["((T([3], f32, at=0, nbytes=12),), {})"]}, 400, "stored contents"),
        ({"cases": [CASE] * 1001}, 400, "1000 are allowed"),
        ({"language": "fortran"}, 400, "known: cpp, cuda, python"),
        ({"reward": "mine"}, 400, "known: correct, speed"),
        ({"surce": "x"}, 422, "surce"),
        ({"cases": 3}, 422, "cases"),
        ({"source": "x" * 70_000}, 413, "more than 65536 bytes"),
    ],
)
def test_a_bad_request_is_answered_with_what_is_wrong(server, changes, status, words):
    reply = post(server, {"op": "relu", "source": RELU, "cases": [CASE], **changes})
    assert (reply.status_code, words in reply.text) == (status, True), reply.text


def test_clients_need_a_token_and_see_only_their_own_requests(server):
    body = {"op": "relu", "source": WRONG + "# ana's\n", "cases": [OTHER], "timed": False}
    for token in ("wrong", ANA + "x", "ana", BEN[:-1]):
        assert post(server, body, token).status_code == 401
    mine = post(server, body).json()
    path = f"{server.url}/requests/{mine['id']}"
    assert httpx.get(path, headers={"Authorization": f"Bearer {ANA}"}).json() == mine
    for end in ("", "/events"):
        assert httpx.get(path + end, headers={"Authorization": f"Bearer {BEN}"}).status_code == 404
    assert post(server, body, BEN).json()["id"] != mine["id"]
    stored = b"".join(file.read_bytes() for file in server.data.rglob("*") if file.is_file())
    assert ANA.encode() not in stored
    assert ANA not in server.stderr()


def test_events_tell_when_a_request_is_answered(server):
    body = {"op": "relu", "source": RELU + "# events\n", "cases": [CASE], "timed": False}
    sent = post(server, body, wait=0)
    assert sent.status_code == 202
    assert sent.json()["state"] == "queued"
    path = f"{server.url}{sent.headers['Location']}/events"
    with httpx.stream("GET", path, headers={"Authorization": f"Bearer {ANA}"}, timeout=60) as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: ")]
    assert events[-1]["state"] == "done"
    assert events[-1]["answer"]["right"]


def test_broken_and_silent_clients_harm_nobody(server, ana):
    host, port = server.url.removeprefix("http://").split(":")
    idle = []
    for words in (b"", b"GET /", b"POST /judge HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{", b"\0" * 1000):
        idle.append(socket.create_connection((host, int(port))))
        idle[-1].sendall(words)
    assert ana.judge("relu", RELU + "# beside broken clients\n", cases=[OTHER], timed=False).right
    for connection in idle:
        connection.close()
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


def test_calls_and_bodies_of_any_size_harm_nobody(server, ana):
    for op, case in (
        ("relu", "((T([100000, 100000], f32),), {})"),
        ("ones", "(([100000, 100000],), {})"),
        ("relu", "((T([9223372036854775807, 9223372036854775807], f32),), {})"),
    ):
        source = f"import torch\ndef {op}_kernel_impl(*args, **kwargs):\n    return torch.zeros(3)\n"
        reply = post(server, {"op": op, "source": source, "cases": [case], "timed": False})
        assert reply.status_code == 400 or not reply.json()["answer"]["right"], reply.text
    for body in ("[" * 60_000, '{"op":' * 9_000, '{"op": "relu", "source": "\\ud800"}', "NaN", "1e999999"):
        assert httpx.post(
            f"{server.url}/judge", content=body, headers={"Authorization": f"Bearer {ANA}"}
        ).is_client_error
    assert ana.judge("relu", RELU + "# after hostile calls\n", cases=[OTHER], timed=False).right


def test_counts_for_prometheus_and_a_description_of_the_interface(server, ana):
    ana.judge("relu", RELU, cases=[OTHER], timed=False)
    counts = dict(line.split() for line in httpx.get(f"{server.url}/metrics").text.splitlines() if line[0] != "#")
    assert float(counts["opforge_requests_answered"]) >= 1
    assert float(counts["opforge_requests_failed"]) == 0
    described = httpx.get(f"{server.url}/openapi.json").json()
    assert {"/judge", "/requests/{identifier}", "/requests/{identifier}/events"} <= set(described["paths"])
    assert "source" in described["components"]["schemas"]["JudgeBody"]["properties"]


def test_a_killed_server_loses_no_request_and_judges_none_twice(tmp_path):
    data, bodies = tmp_path / "data", [{"op": "relu", "source": f"{RELU}# {n}\n", "cases": [CASE]} for n in range(8)]
    with serving(data, "--workers", "1") as server:
        first = post(server, bodies[0]).json()
        ids = [post(server, body, wait=0).json()["id"] for body in bodies]
        server.process.kill()
    before = {run.parent.name: run.stat().st_mtime_ns for run in data.glob("runs/*/*/run")}
    assert first["id"] in before
    with serving(data, "--workers", "1") as server:
        assert server.left >= 1
        answers = [httpx.get(f"{server.url}/requests/{identifier}?wait=120", timeout=150).json() for identifier in ids]
        assert [answer["state"] for answer in answers] == ["done"] * len(bodies)
        assert all(answer["answer"]["right"] for answer in answers)
        assert answers[0] == first
        assert post(server, bodies[3]).json() == answers[3]
        assert len(list(data.glob("runs/*/*/run"))) == len(bodies)
        assert (data / "runs" / first["id"][:2] / first["id"] / "run").stat().st_mtime_ns == before[first["id"]]


@pytest.mark.slow
def test_a_server_that_is_told_to_end_finishes_what_it_judges_and_keeps_the_rest(tmp_path):
    slow = "import time\n" + RELU.replace("    return", "    time.sleep(0.02)\n    return")
    with serving(tmp_path / "data", "--workers", "1") as server:
        for number in range(5):
            assert post(server, {"op": "relu", "source": f"{slow}# {number}\n", "cases": [CASE]}, wait=0).is_success
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0, server.stderr()
    store = RequestStore(tmp_path / "data" / "requests.sqlite")
    assert len(store.waiting()) >= 3
    store.close()


@pytest.mark.slow
def test_a_request_that_ends_each_server_is_given_up_and_others_are_judged(tmp_path):
    """A kernel that hangs while it loads stands for one that ends the server: the test kills it meanwhile."""
    data = tmp_path / "data"
    hangs = {"op": "relu", "source": f"import time\ntime.sleep(600)\n{RELU}", "cases": [CASE]}
    waits = {"op": "relu", "source": RELU, "cases": [CASE]}
    with serving(data, "--workers", "1") as server:
        lethal = post(server, hangs, wait=0).json()["id"]
        until_begun(data, lethal, 1)
        other = post(server, waits, wait=0).json()["id"]
    for times in (2, 3):
        with serving(data, "--workers", "1"):
            until_begun(data, lethal, times)
    with serving(data, "--workers", "1") as server:
        answers = [
            httpx.get(f"{server.url}/requests/{identifier}?wait=100", timeout=120).json()
            for identifier in (lethal, other)
        ]
    assert answers[0]["answer"]["error"].startswith("3 servers ended while they judged this request")
    assert answers[1]["answer"]["right"]


def until_begun(data: Path, identifier: str, times: int) -> None:
    """Wait until a server has begun to judge a request for the given time."""
    with closing(sqlite3.connect(data / "requests.sqlite")) as database:
        for _ in range(600):
            if database.execute("SELECT times FROM begun WHERE id = ?", (identifier,)).fetchone() == (times,):
                return
            time.sleep(0.1)
    raise AssertionError("the request was not begun")


def test_one_client_may_not_fill_the_queue(tmp_path):
    slow = "import time\n" + RELU.replace("    return", "    time.sleep(1)\n    return")
    with serving(tmp_path / "data", "--workers", "1", "--max-pending", "2") as server:
        replies = [
            post(server, {"op": "relu", "source": f"{slow}# {number}\n", "cases": [CASE]}, wait=0)
            for number in range(6)
        ]
    assert [reply.status_code for reply in replies][:1] == [202]
    refused = [reply for reply in replies if reply.status_code == 429]
    assert refused
    assert all("limit" in reply.json()["detail"] and int(reply.headers["Retry-After"]) > 0 for reply in refused)


def test_two_servers_do_not_share_a_folder(server):
    done = opforge_command("serve", "--data", str(server.data), "--port", "0")
    assert (done.returncode, "another server uses --data" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "0.0.0.0"], "clients need tokens; give a file with --tokens"),
        (["--host", "example.org"], "clients need tokens"),
        (["--port", "70000"], "--port 70000 is out of range"),
        (["--max-pending", "0"], "--max-pending 0 is out of range"),
        (["--tokens", "/nowhere"], "cannot be read"),
        (["--suite", "smok"], "did you mean 'smoke'"),
        (["--device", "tpu"], "unknown device 'tpu'"),
        (["--data", "/dev/null/x"], "cannot be used"),
    ],
)
def test_bad_options(tmp_path, words, said):
    done = opforge_command("serve", "--port", "0", *words, cwd=tmp_path)
    assert (done.returncode, said in done.stderr, done.stdout) == (2, True, ""), done.stderr


def test_an_unreachable_server_is_named_when_the_time_is_up():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with (
        opforge.Client(f"http://127.0.0.1:{port}", limit_s=1.5) as client,
        pytest.raises(OpforgeError, match="no answer"),
    ):
        client.judge("relu", RELU)


def test_clients_take_turns():
    queue = FairQueue()
    request = JudgeRequest("relu", RELU)
    for name in ("a1", "a2", "a3", "b1", "c1", "c2"):
        queue.put(StoredRequest(name, name[0], request))
    assert (len(queue), queue.count_of("a"), queue.count_of("z")) == (6, 3, 0)
    assert [queue.take().id for _ in range(6)] == ["a1", "b1", "c1", "a2", "c2", "a3"]
    queue.close()
    assert queue.take() is None


def test_speed_counts_by_the_low_end_of_the_slowest_case_and_only_for_right_kernels():
    def row(low: float, **figures: object) -> ResultRow:
        fields = {"speedup": 2 * low, "speedup_low": low, **figures}
        return ResultRow("relu.default", "k", "", "", "", "performance", "passed", "", (), fields)

    rows = [row(2.1), row(1.3), row(0.1, launch_bound=True)]
    assert reward("speed", rows, is_right=True) == 3.0
    assert reward("speed", [row(0.9)], is_right=True) == 1.0
    assert reward("speed", [], is_right=True) == 1.0
    assert reward("speed", rows, is_right=False) == 0.0
    assert reward("correct", rows, is_right=True) == 1.0


@pytest.mark.parametrize("text", ["ana\n", "ana short\n", "# nothing\n", "a b c d\n"])
def test_a_file_of_tokens_that_has_none_is_refused(tmp_path, text):
    (tmp_path / "tokens").write_text(text)
    with pytest.raises(OpforgeError, match="token"):
        Tokens.read(tmp_path / "tokens")


def test_the_example_of_the_page_works(tmp_path):
    page = (ROOT / "docs" / "serve.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    with serving(tmp_path / "data") as server:
        code = example.replace("http://127.0.0.1:8765", server.url)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True 1.0\n"), done.stderr


@pytest.mark.slow
def test_two_hundred_requests_at_once(server):
    async def ask() -> list[opforge.client.JudgedKernel]:
        async with opforge.AsyncClient(server.url, token=ANA) as client:
            asked = (client.judge("relu", f"{RELU}# {n}\n", cases=[OTHER], timed=False) for n in range(200))
            return await asyncio.gather(*asked)

    judged = asyncio.run(ask())
    assert [one.reward for one in judged] == [1.0] * 200
    assert len({one.id for one in judged}) == 200


@pytest.mark.slow
def test_no_exploit_gets_a_reward_and_honest_kernels_beside_them_do(server):
    exploits = [e for e in CPU if e.cases and not e.special]
    with opforge.Client(server.url, token=ANA) as cheats, opforge.Client(server.url, token=BEN) as honest:

        def reward_of(exploit):
            timed = exploit.cases[:1] if exploit.performance else ()
            return cheats.judge(
                exploit.op, exploit.file.read_text(), cases=exploit.cases, timed_cases=timed,
                refused_cases=exploit.refused, reward="speed",
            ).reward  # fmt: skip

        with ThreadPoolExecutor(4) as threads:
            rewards = threads.map(reward_of, exploits)
            for number in range(20):
                assert honest.judge("relu", f"{RELU}# honest {number}\n", cases=[OTHER], timed=False).reward == 1.0
            found = dict(zip((e.kernel for e in exploits), rewards, strict=True))
    most = {e.kernel: 0.0 if e.untrue else 1.0 for e in exploits}  # these may pass with their own time
    assert {kernel: got for kernel, got in found.items() if got > most[kernel]} == {}
