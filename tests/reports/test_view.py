"""opforge view: what it serves, to whom, and while a run goes on."""

from __future__ import annotations

import base64
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from opforge.cache import write_atomically
from opforge.errors import OpforgeError, RunDirectoryError
from opforge.kernels.custom_folder import digest
from opforge.kernels.proof import proof_path
from opforge.reports.page.view_server import ViewServer
from opforge.runtime.proof_files import PROOF_FORMAT
from tests.conftest import ROOT, slow
from tests.install.proving import write
from tests.reports.browsing import chromium, manifest, row, texts, write_run

Serve = Callable[..., ViewServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return a function that serves a folder on a free port."""
    servers = []

    def started(folder: Path, host: str = "127.0.0.1", port: int | None = 0) -> ViewServer:
        server = ViewServer(folder, host, port)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        servers.append((server, thread))
        return server

    yield started
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run that has begun: two of its four cases are judged."""
    about = manifest({"a": ["a.default"], "b": ["b.default"]}, 4)
    return write_run(tmp_path / "runs" / "one", about, [row("a.default", "a", n) for n in range(2)])


def ask(
    server: ViewServer, path: str, *, method: str = "GET", host: str | None = None, **headers: str
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host if host is not None else f"127.0.0.1:{server.server_port}")
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, dict(answer.headers)


def unpacked(text: str) -> list[Any]:
    return [json.loads(zlib.decompress(base64.b64decode(chunk))) for chunk in json.loads(text)]


def append(folder: Path, *rows: dict[str, Any]) -> None:
    with (folder / "results.jsonl").open("a") as handle:
        handle.write("".join(json.dumps(line) + "\n" for line in rows))


def test_a_run_and_what_comes_to_it(serve, run):
    server = serve(run)
    status, page, headers = ask(server, "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "connect-src 'self'" in page
    data = json.loads(ask(server, "/data")[1])
    assert data["state"] == data["state"] | {"word": "interrupted", "judged": 2, "planned": 4}
    assert ask(server, f"/data?since={data['version']}")[:2] == (204, "")
    with FileLock(run / ".lock"):  # as a process that goes on with the run holds it
        append(run, row("b.default", "b", 0, "wrong", reason="off by one"))
        with (run / "results.jsonl").open("a") as handle:
            handle.write('{"op": "b.def')  # the line that is being written is not read yet
        grown = json.loads(ask(server, f"/data?since={data['version']}")[1])
    assert grown["state"] == grown["state"] | {"word": "running", "judged": 3, "planned": 4}
    assert grown["units"]["verdict"] == ["passed", "wrong"]
    (cases,) = unpacked(ask(server, "/blob/unit:1")[1])
    assert [case["reason"] for case in cases] == ["off by one"]
    assert json.loads(ask(server, "/data")[1])["state"]["word"] == "interrupted"


def test_another_run_in_its_place_is_read_from_its_beginning(serve, run):
    server = serve(run)
    assert json.loads(ask(server, "/data")[1])["state"]["judged"] == 2
    about = manifest({"c": ["c.default"]}, 9) | {"started": "2026-02-02T00:00:00+00:00"}
    write_run(run, about, [row("c.default", "c", n) for n in range(5)])
    data = json.loads(ask(server, "/data")[1])
    assert (data["state"]["judged"], data["units"]["op"]) == (5, ["c.default"])


def test_a_folder_of_runs_is_listed(serve, run):
    other = write_run(
        run.parent / "two & <b>", manifest({"a": ["a.default"]}, 1, finished="x", scores={"correctness": 0.5}), []
    )
    (run.parent / "broken").mkdir()
    (run.parent / "broken" / "manifest.json").write_text("{")
    (run.parent / "no run").mkdir()
    server = serve(run.parent)
    listed = {r["name"]: r for r in json.loads(ask(server, "/data")[1])["runs"]}
    assert set(listed) == {"one", other.name, "broken"}
    assert (listed[other.name]["state"], listed[other.name]["correctness"]) == ("finished", "0.5000")
    assert "is broken" in listed["broken"]["state"]
    assert ask(server, "/run/one")[2]["Location"] == "/run/one/"
    assert ask(server, "/run/one/")[0] == 200
    assert ask(server, "/run/two%20%26%20%3Cb%3E/data")[0] == 200
    assert ask(server, "/run/broken/")[0] == 404


@pytest.mark.parametrize(
    "path",
    [
        "/../secret", "/run/../secret", "/run/..%2fsecret/", "/run/%2e%2e/data", "/run/one/../../secret", "/run//etc/passwd",
        "/run/one/manifest.json", "/run/one/results.jsonl", "/run/one/blob/..%2f..%2fsecret", "/run/one/blob/unit:-1",
        "/run/one/blob/unit:9999", "/run/one/blob/kernel:7", "/run/one/blob/unit:%C2%B2", "/run/secret/", "//secret/",
    ],
)  # fmt: skip
def test_no_path_leads_out(serve, run, path):
    (run.parent / "secret").write_text("the secret")
    (run.parent.parent / "secret").write_text("the secret")
    status, text, _ = ask(serve(run.parent), path)
    assert status in (400, 404)
    assert "the secret" not in text


def test_a_source_is_read_out_only_as_it_was_judged(serve, run, tmp_path):
    secret = tmp_path / "secret.py"
    secret.write_text("the secret")
    about = json.loads((run / "manifest.json").read_text())
    about["plan"]["kernels"][0] |= {"file": str(secret), "digest": "0123456789abcdef"}
    (run / "manifest.json").write_text(json.dumps(about))
    (source,) = unpacked(ask(serve(run), "/blob/kernel:0")[1])
    assert source["text"] == ""
    assert "was changed or removed after the run" in source["remark"]


def test_only_its_own_name_is_answered_to(serve, run):
    server = serve(run)
    for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1", "127.0.0.1:1", ""):
        status, text, _ = ask(server, "/", host=host)
        assert status == 403, host
        assert "a.default" not in text
    assert ask(server, "/", host=f"localhost:{server.server_port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_it_only_reads(serve, run, method):
    before = {p: p.stat().st_mtime_ns for p in run.iterdir()}
    assert ask(serve(run), "/", method=method)[0] == 501
    assert {p: p.stat().st_mtime_ns for p in run.iterdir()} == before


def test_another_address_wants_the_token(serve, run):
    server = serve(run, "0.0.0.0")
    assert len(server.token) >= 32
    assert server.url.endswith(f"/?token={server.token}")
    for path in ("/", "/data", "/blob/unit:0", "/?token=", "/?token=wrong"):
        status, text, _ = ask(server, path)
        assert status == 403, path
        assert "a.default" not in text
    assert ask(server, "/", Cookie=f"{server.cookie}=wrong")[0] == 403
    assert ask(server, "/", Cookie="=;;\x01")[0] == 403
    status, _, headers = ask(server, f"//elsewhere.example/?token={server.token}")
    assert (status, headers["Location"]) == (303, "/elsewhere.example/")
    cookie = headers["Set-Cookie"].partition(";")[0]
    assert "HttpOnly" in headers["Set-Cookie"]
    assert ask(server, "/data", Cookie=cookie)[0] == 200
    assert serve(run, "127.0.0.1").token == ""


def test_bad_folders_and_ports(tmp_path, serve, run):
    with pytest.raises(RunDirectoryError, match="there is no folder"):
        ViewServer(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunDirectoryError, match="holds no run"):
        ViewServer(tmp_path / "empty")
    taken = serve(run).server_port
    for port in (taken, 99999):
        with pytest.raises(OpforgeError, match="give another --host or --port"):
            ViewServer(run, "127.0.0.1", port)
    with pytest.raises(OpforgeError, match=r"cannot listen on 203\.0\.113\.1"):
        ViewServer(run, "203.0.113.1", 0)


def test_a_silent_caller_keeps_nobody_waiting(serve, run):
    server = serve(run)
    with socket.create_connection(("127.0.0.1", server.server_port)):
        assert ask(server, "/data")[0] == 200


@pytest.mark.parametrize("ending", [slow(signal.SIGINT), signal.SIGTERM])
def test_the_command_serves_until_it_is_ended(run, ending):
    command = [sys.executable, "-m", "opforge.cli", "view", str(run), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        address = process.stdout.readline().strip()
        host, port = address.removeprefix("http://").strip("/").split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        connection.request("GET", "/")
        assert "a.default" in connection.getresponse().read().decode()
        connection.close()
        process.send_signal(ending)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert said == "press Ctrl-C to stop\n"


def test_the_page_follows_a_run(serve, run, tmp_path):
    server = serve(run.parent)
    with chromium(tmp_path / "profile") as browser:
        from selenium.webdriver.common.by import By
        from selenium.webdriver.support.wait import WebDriverWait

        browser.get(server.url)
        browser.find_element(By.LINK_TEXT, "one").click()
        WebDriverWait(browser, 30).until(lambda b: b.find_elements(By.ID, "state"))
        browser.find_element(By.ID, "search").send_keys("b.default")
        append(run, row("b.default", "b", 0, "crashed", reason="gone"))
        WebDriverWait(browser, 30).until(lambda b: "3 of 4" in "".join(texts(b, "#state")))
        (shown,) = texts(browser, "#rows .row")  # what was typed is still there
        assert "1 crashed" in shown
        browser.execute_script("document.querySelector('#rows .row').click()")
        WebDriverWait(browser, 30).until(lambda b: texts(b, "dialog .reason"))
        assert texts(browser, "dialog .reason")[0] == "gone"
        assert browser.execute_script("return window.violations") == []


@pytest.mark.slow
def test_an_operator_that_is_open_follows_the_run(serve, run, tmp_path):
    kernel = tmp_path / "b.py"
    kernel.write_text("def b_kernel_impl(self): ...")
    about = json.loads((run / "manifest.json").read_text())
    about["plan"]["kernels"][1] |= {"file": str(kernel), "digest": digest(kernel)}
    about["machine"]["name"] = "a CPU"
    write_run(
        run, about, [row("a.default", "a"), row("b.default", "b", 0, "contract", reason="first", case="((1,), {})")]
    )
    server = serve(run)
    with chromium(tmp_path / "profile") as browser:
        from selenium.webdriver.common.by import By
        from selenium.webdriver.support.wait import WebDriverWait

        def until(words: str) -> None:
            WebDriverWait(browser, 30).until(lambda b: words in b.find_element(By.ID, "detail").text)

        browser.get(f"{server.url}#b.default|b")
        until("Cases: 1 of 1 failed")
        assert "they are written at its end" in browser.find_element(By.ID, "detail").text
        summary = browser.find_element(By.CSS_SELECTOR, "dialog .case summary")
        browser.execute_script("arguments[0].focus(); arguments[0].parentElement.mark = 1", summary)
        append(run, row("b.default", "b", 1, "wrong", reason="second", case="((2,), {})"))
        until("Cases: 2 of 2 failed")
        assert texts(browser, "dialog header .badge") == ["wrong"]
        rows = browser.find_elements(By.CSS_SELECTOR, "dialog .case")  # the graver comes first; what was open stays so
        assert [(r.get_property("mark"), r.get_property("open")) for r in rows] == [(None, False), (1, True)]
        assert browser.execute_script("return document.activeElement === arguments[0]", summary)

        append(run, row("a.default", "a", 1))
        proven = {"b.default": {"float32": {"rank": [1, 2], "numel": [3, 4], "extents": [], "layouts": ["contiguous"]}}}
        proof = {
            "opforge_proof": PROOF_FORMAT,
            "digest": digest(kernel),
            "torch": "2.13.0",
            "device": "a CPU",
            "suites": ["tiny"],
            "operators": proven,
        }
        write(proof_path(kernel), proof)
        write_atomically(
            run / "manifest.json",
            json.dumps({**about, "finished": "now", "proofs": {"written": [str(proof_path(kernel))]}}),
        )
        until("b.default float32 1 to 2 3 to 4 contiguous not timed")
        assert browser.execute_script("return window.violations") == []
