"""Tools for coding agents, over the Model Context Protocol. Answers are short and name the next step."""

from __future__ import annotations

import asyncio
import functools
import shlex
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from opforge import __version__
from opforge.errors import OpforgeError
from opforge.runs.store import read_rows
from opforge.serve.judge_request import JudgeRequest
from opforge.serve.kernel_judge import KernelJudge
from opforge.serve.request_store import StoredRequest
from opforge.serve.service import RequestService

CLIENT = "agent"
_MAX_FAILURES = 5
_MAX_TIMES = 12
_MAX_TEXT = 400
INSTRUCTIONS = """Write a PyTorch operator kernel as a Python file that defines NAME_kernel_impl(...) with the
operator's arguments. Look at its cases with list_cases. Judge it with judge_kernel until it is right in all of them,
then time it with time_kernel. A kernel may not call the operator that it replaces. Every answer names the next step."""


@dataclass(frozen=True)
class Operators:
    """Operators of the suite."""

    operators: dict[str, int]
    """Operators with their number of cases."""
    left_out: int
    next_step: str


@dataclass(frozen=True)
class Calls:
    """Calls on which kernels of an operator are judged."""

    op: str
    calls: list[str]
    left_out: int
    next_step: str


@dataclass(frozen=True)
class Failure:
    """Cases that fail for one reason, with the worst of them."""

    op: str
    verdict: str
    reason: str
    cases: int
    call: str


@dataclass(frozen=True)
class Judged:
    """The verdict on a kernel."""

    request: str
    right: bool
    passed: int
    cases: int
    failures: list[Failure]
    next_step: str


@dataclass(frozen=True)
class Speed:
    """The speed of one call; ``low`` and ``high`` are the ends of a 95 % interval."""

    call: str
    speedup: float
    low: float
    high: float
    kernel_us: float | None
    aten_us: float | None
    percent_of_peak: float | None
    launch_bound: bool


@dataclass(frozen=True)
class Timed:
    """The verdict on a kernel, and its times, the slowest beside ATen first."""

    request: str
    right: bool
    times: list[Speed]
    failures: list[Failure]
    next_step: str


@dataclass(frozen=True)
class Explained:
    """A failing case."""

    op: str
    call: str
    verdict: str
    reason: str
    figures: dict[str, float]
    """Errors and bounds of the worst element, where numbers were compared."""
    reproduce: str
    next_step: str


@dataclass(frozen=True)
class Bound:
    """How near a call comes to what the device can do."""

    call: str
    limited_by: str
    kernel_percent: float | None
    aten_percent: float | None
    bytes: int | None
    flops: int | None


@dataclass(frozen=True)
class Roofline:
    """How near the timed calls of a kernel come to what the device can do."""

    calls: list[Bound]
    next_step: str


@dataclass(frozen=True)
class Commands:
    """Commands for a shell."""

    commands: list[str] = field(default_factory=list)
    next_step: str = ""


class AgentTools:
    """The tools; the judge behind them starts in the background, as an agent waits for its tools."""

    def __init__(self, start: Callable[[], RequestService]) -> None:
        starter = ThreadPoolExecutor(1)
        self._service: Future[RequestService] = starter.submit(start)
        starter.shutdown(wait=False)

    def close(self) -> None:
        """Finish what is being judged, and end the judge."""
        if self._service.exception() is None:
            service = self._service.result()
            service.close()
            service.judge.close()

    async def list_operators(self, containing: str = "", limit: int = 40) -> Operators:
        """List the operators that have cases here, with their number; ``containing`` is a part of the name."""
        cases = (await self._judge()).suite.cases
        names = [op for op in sorted(cases) if containing in op]
        shown = names[: max(limit, 0)]
        step = "list_cases(op) shows an operator's calls" if shown else "ask with another part of a name, or with none"
        return Operators({op: len(cases[op]) for op in shown}, len(names) - len(shown), step)

    async def list_cases(self, op: str, limit: int = 20) -> Calls:
        """List calls on which kernels of an operator are judged, such as ((T([64, 33], f32),), {})."""
        judge = await self._judge()
        primary = op if op in judge.suite.cases else f"{op}.default"
        texts = list(dict.fromkeys(case.args for case in judge.suite.cases.get(primary, ())))
        shown = [_short(text) for text in texts[: max(limit, 0)]]
        step = "judge_kernel(op, source) judges a kernel on all of them" if texts else (
            f"the suite has no case for {op}: give judge_kernel cases of your own, such as ((T([64, 33], f32),), {{}})"
        )  # fmt: skip
        return Calls(primary, shown, len(texts) - len(shown), step)

    async def judge_kernel(
        self,
        op: str,
        source: str,
        language: str = "python",
        cases: Sequence[str] = (),
        refused_cases: Sequence[str] = (),
    ) -> Judged:
        """Judge a kernel against ATen in a confined process, on the suite's calls or on ``cases``, in hostile variants.

        ``source`` is the text of its file, ``language`` python (also Triton), cpp or cuda. On ``refused_cases`` it must
        raise.
        """
        request = JudgeRequest(
            op, source, language, tuple(cases), refused_cases=tuple(refused_cases), timed=False
        )  # fmt: skip
        stored, answer = await self._answered(request)
        scores, failures = answer["feedback"]["scores"], _failures(answer)
        step = f"explain_failure('{stored.id}') shows the worst failing case" if failures else (
            "time_kernel(op, source, timed_cases=[…]) compares its speed with ATen's"
        )  # fmt: skip
        return Judged(
            stored.id, answer["right"], scores["verdicts"].get("passed", 0), scores["cases"], failures, step
        )  # fmt: skip

    async def time_kernel(
        self, op: str, source: str, timed_cases: Sequence[str], language: str = "python"
    ) -> Timed:  # fmt: skip
        """Judge a kernel on some calls and, if it is right, time it against ATen on each."""
        if not timed_cases:
            raise OpforgeError("give the calls to time in timed_cases, such as ((T([1024, 1024], f32),), {})")
        stored, answer = await self._answered(JudgeRequest(op, source, language, timed_cases=tuple(timed_cases)))
        times = [_speed(row) for row in answer["feedback"]["times"][:_MAX_TIMES]]
        failures = _failures(answer)
        if failures:
            step = f"explain_failure('{stored.id}') shows the worst failing case: only right kernels are timed"
        elif times and min(speed.low for speed in times) > 1:
            step = f"it is surely faster than ATen on these calls; reproduce('{stored.id}') shows how to ship it"
        else:
            step = f"show_roofline('{stored.id}') tells what limits each call; change the kernel and time it again"
        return Timed(stored.id, answer["right"], times, failures, step)

    async def explain_failure(self, request: str, number: int = 0) -> Explained:
        """Explain a failure of a judged kernel: 0 is the first of its list."""
        stored, answer = await self._earlier(request)
        groups = answer["feedback"]["failures"]
        if not 0 <= number < len(groups):
            raise OpforgeError(f"there is no failure {number}: the request has {len(groups)}, counted from 0")
        group, case = groups[number], groups[number]["cases"][0]
        figures = {name: case[name] for name in ("kernel_error", "aten_error", "bound", "rtol", "atol") if name in case}
        command = f"opforge reproduce {shlex.quote(str(await self._run(stored)))} {case['id']}"
        step = "mend the kernel, then judge_kernel again"
        return Explained(
            group["op"], _short(case["case"]), group["verdict"], _short(case.get("reason", group["reason"])), figures,
            command, step,
        )  # fmt: skip

    async def show_roofline(self, request: str) -> Roofline:
        """Show how near each timed call of a kernel comes to what the device can do, and what limits it."""
        stored, _answer = await self._earlier(request)
        rows = [(r.case, r.figures["sol"]) for r in read_rows(await self._run(stored)) if "sol" in r.figures]
        if not rows:
            raise OpforgeError("nothing of this request was timed; send the kernel with time_kernel")
        calls = [
            Bound(_short(call), sol["bound"], sol.get("kernel"), sol.get("aten"), sol.get("bytes"), sol.get("flops"))
            for call, sol in rows[:_MAX_TIMES]
        ]
        return Roofline(calls, "a call far below 100 % has room: change the kernel, then time_kernel again")

    async def reproduce(self, request: str) -> Commands:
        """Return the commands that show a request's run again, judge a failing case alone, and ship a right kernel."""
        stored, answer = await self._earlier(request)
        run = await self._run(stored)
        folder, kernels = shlex.quote(str(run)), shlex.quote(str(run.parent / "kernels"))
        commands = [f"opforge report {folder}"]
        commands += [
            f"opforge reproduce {folder} {group['cases'][0]['id']}"
            for group in answer["feedback"]["failures"][:_MAX_FAILURES]
        ]
        if answer["right"]:
            commands.append(f"opforge pack {kernels} --name my_kernels")
        return Commands(commands, "run them in a shell")

    async def _judge(self) -> KernelJudge:
        return (await self._ready()).judge

    async def _ready(self) -> RequestService:
        return await asyncio.shield(asyncio.wrap_future(self._service))

    async def _answered(self, request: JudgeRequest) -> tuple[StoredRequest, dict[str, Any]]:
        service = await self._ready()
        stored = await asyncio.to_thread(service.submit, CLIENT, request)
        if stored.answer is None:
            stored = await asyncio.wrap_future(service.answer(stored))
        return stored, _verdict(stored)

    async def _earlier(self, request: str) -> tuple[StoredRequest, dict[str, Any]]:
        stored = (await self._ready()).store.get(CLIENT, request)
        if stored is None:
            raise OpforgeError(f"there is no request {request!r}; judge_kernel and time_kernel name theirs")
        return stored, _verdict(stored)

    async def _run(self, stored: StoredRequest) -> Path:
        return (await self._judge()).run_folder(stored.id) / "run"


def make_server(tools: AgentTools) -> MCPServer:
    """Return the server of these tools."""
    server = MCPServer(
        "opforge", version=__version__, instructions=INSTRUCTIONS, log_level="WARNING"
    )  # fmt: skip
    for tool in (
        tools.list_operators, tools.list_cases, tools.judge_kernel, tools.time_kernel, tools.explain_failure,
        tools.show_roofline, tools.reproduce,
    ):  # fmt: skip
        server.tool()(_with_our_errors(tool))
    return server


def _with_our_errors(tool: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return a tool whose errors reach the agent as text; others are the server's own affair."""

    @functools.wraps(tool)
    async def answered(*args: Any, **given: Any) -> Any:
        try:
            return await tool(*args, **given)
        except OpforgeError as error:
            raise ToolError(str(error)) from None

    return answered


def _verdict(stored: StoredRequest) -> dict[str, Any]:
    """Return a request's answer; raises if it has no verdict."""
    answer = stored.answer or {"error": "it is still being judged; ask again"}
    if "error" in answer:
        raise OpforgeError(f"request {stored.id}: {answer['error']}")
    return answer


def _failures(answer: dict[str, Any]) -> list[Failure]:
    return [
        Failure(
            group["op"], group["verdict"], _short(group["reason"]), group["count"], _short(group["cases"][0]["case"])
        )
        for group in answer["feedback"]["failures"][:_MAX_FAILURES]
    ]  # fmt: skip


def _speed(row: dict[str, Any]) -> Speed:
    return Speed(
        _short(row["case"]), row["speedup"], row["speedup_low"], row["speedup_high"], row["kernel_us"], row["aten_us"],
        row["sol_percent"], row["launch_bound"],
    )  # fmt: skip


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"
