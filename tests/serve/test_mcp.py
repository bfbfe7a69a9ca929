"""`opforge mcp` asked by the SDK's own client, over standard input and output and over HTTP."""

from __future__ import annotations

import asyncio
import json
import shlex
import socket
import subprocess
import sys
import time
from typing import Any

import httpx
import pytest
from mcp import Client, StdioServerParameters

from tests.command import opforge
from tests.serve.serving import CASE, OTHER, RELU, WRONG

TIMED = "((T([512, 512], f32),), {})"
COMMAND = ["-m", "opforge.cli", "mcp", "--race-seconds", "0.3"]


async def ask(client: Client, tool: str, **given: Any) -> dict[str, Any]:
    """Return a tool's structured answer; it is short."""
    result = await client.call_tool(tool, given)
    assert not result.is_error, result.content
    assert len(json.dumps(result.structured_content)) < 8000
    return result.structured_content


async def refusal(client: Client, tool: str, **given: Any) -> str:
    result = await client.call_tool(tool, given)
    assert result.is_error
    return result.content[0].text


async def from_wrong_to_fast(client: Client) -> list[str]:
    """Do what an agent does, following the next steps; return the commands of the kernel that is right."""
    tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert set(tools) == {
        "list_operators", "list_cases", "judge_kernel", "time_kernel", "explain_failure", "show_roofline", "reproduce",
    }  # fmt: skip
    assert all(tool.description and tool.output_schema for tool in tools.values())
    listed = await ask(client, "list_operators", containing="rel")
    assert listed["operators"] == {"relu.default": 2}
    calls = await ask(client, "list_cases", op="relu", limit=1)
    assert (len(calls["calls"]), calls["left_out"]) == (1, 1)

    wrong = await ask(client, "judge_kernel", op="relu", source=WRONG, cases=[CASE, OTHER])
    assert not wrong["right"]
    assert wrong["failures"][0]["verdict"] == "wrong"
    assert wrong["next_step"].startswith(f"explain_failure('{wrong['request']}')")
    why = await ask(client, "explain_failure", request=wrong["request"])
    assert why["call"] in (CASE, OTHER)
    assert why["figures"]["kernel_error"] > why["figures"]["bound"]
    again = opforge(*shlex.split(why["reproduce"])[1:])
    assert again.returncode == 1, again.stderr
    assert "wrong" in again.stdout

    right = await ask(client, "judge_kernel", op="relu", source=RELU, cases=[CASE, OTHER])
    assert (right["right"], right["passed"], right["failures"]) == (True, 2, [])
    timed = await ask(client, "time_kernel", op="relu", source=RELU, timed_cases=[TIMED])
    assert timed["right"]
    (speed,) = timed["times"]
    assert 0 < speed["low"] <= speed["speedup"] <= speed["high"]
    (bound,) = (await ask(client, "show_roofline", request=timed["request"]))["calls"]
    assert bound["limited_by"] == "memory"
    assert bound["aten_percent"] > 0
    return (await ask(client, "reproduce", request=timed["request"]))["commands"]


def test_an_agent_gets_from_a_wrong_kernel_to_a_timed_one(tmp_path):
    async def converse() -> list[str]:
        server = StdioServerParameters(command=sys.executable, args=[*COMMAND, "--data", str(tmp_path / "data")])
        async with Client(server) as client:
            assert "judge_kernel" in client.instructions
            commands = await from_wrong_to_fast(client)
            assert "'nothing'" in await refusal(client, "explain_failure", request="nothing")
            assert "did you mean 'relu'" in await refusal(client, "judge_kernel", op="rellu", source=RELU)
            assert "timed_cases" in await refusal(client, "time_kernel", op="relu", source=RELU, timed_cases=[])
            return commands

    report, pack = asyncio.run(converse())
    assert opforge(*shlex.split(report)[1:]).returncode == 0
    packed = opforge(*shlex.split(pack)[1:], "--out", str(tmp_path / "dist"))
    assert packed.returncode == 0, packed.stderr
    assert list((tmp_path / "dist").glob("*.whl"))


@pytest.mark.slow
def test_agents_over_http_share_a_judge(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, *COMMAND, "--data", str(tmp_path / "data"), "--http", str(port)]
    with subprocess.Popen(command) as server:
        try:
            asyncio.run(both(port))
        finally:
            server.terminate()


async def both(port: int) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            _reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            break
        except OSError:
            assert time.monotonic() < until
            await asyncio.sleep(0.1)
    async with Client(f"http://127.0.0.1:{port}/mcp") as one, Client(f"http://127.0.0.1:{port}/mcp") as other:
        given = {"op": "relu", "source": RELU, "cases": [CASE]}
        first, second = await asyncio.gather(ask(one, "judge_kernel", **given), ask(other, "judge_kernel", **given))
        assert first == second
        assert first["right"]
    async with httpx.AsyncClient() as page:  # a web page asks
        for name, value in (("Host", f"evil.example:{port}"), ("Origin", "http://evil.example")):
            asked = await page.post(f"http://127.0.0.1:{port}/mcp", json={}, headers={name: value})
            assert asked.status_code in (403, 421), asked.text


@pytest.mark.parametrize(
    ("words", "said"), [(["--http", "0"], "--http"), (["--suite", "nosuch"], "nosuch"), (["--device", "tpu"], "tpu")]
)
def test_bad_options(tmp_path, words, said):
    done = opforge("mcp", "--data", str(tmp_path / "data"), *words)
    assert done.returncode == 2
    assert said in done.stderr
