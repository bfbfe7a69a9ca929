"""Clients of `opforge serve`. They need httpx, and no torch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from opforge.errors import OpforgeError

try:
    import httpx
except ImportError:
    raise OpforgeError("opforge.Client needs httpx; pip install 'opforge[client]'") from None

DEFAULT_URL = "http://127.0.0.1:8765"
_WAIT_S = 50
_PAUSE_S = 1.0
_MAX_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True)
class JudgedKernel:
    """The answer to a request."""

    id: str
    right: bool
    reward: float
    feedback: dict[str, Any]
    """Scores, failures with their reasons, and times; empty if there is an error."""
    proof: dict[str, Any] | None = None
    error: str = ""
    """Why there is no verdict: an internal error of the server, for example."""

    @classmethod
    def from_wire(cls, fields: dict[str, Any]) -> JudgedKernel:
        answer = fields["answer"]
        return cls(
            fields["id"],
            answer["right"],
            answer["reward"],
            answer.get("feedback", {}),
            answer.get("proof"),
            answer.get("error", ""),
        )


@dataclass(frozen=True, slots=True)
class _Call:
    """A request to be sent next, after a pause."""

    method: str
    path: str
    body: dict[str, Any] | None = None
    pause_s: float = 0.0


_Steps = Generator[_Call, httpx.Response | httpx.TransportError, JudgedKernel]


def _steps(body: dict[str, Any], limit_s: float) -> _Steps:
    """Send a request until it is answered.

    A server that cannot be reached is asked again: it judges the same request once, also after it was restarted.
    """
    until = time.monotonic() + limit_s
    call, pause_s = _Call("POST", f"/judge?wait={_WAIT_S}", body), _PAUSE_S
    while True:
        reply = yield call
        problem = ""
        if isinstance(reply, httpx.TransportError):
            problem = str(reply) or type(reply).__name__
            call = _Call(call.method, call.path, call.body, pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        elif reply.status_code == httpx.codes.OK:
            return JudgedKernel.from_wire(reply.json())
        elif reply.status_code == httpx.codes.ACCEPTED:
            call, pause_s = _Call("GET", f"/requests/{reply.json()['id']}?wait={_WAIT_S}"), _PAUSE_S
        elif reply.status_code in (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE):
            problem = _detail(reply)
            call = _Call(call.method, call.path, call.body, float(reply.headers.get("Retry-After", _PAUSE_S)))
        else:
            raise OpforgeError(f"the server refused the request ({reply.status_code}): {_detail(reply)}")
        if time.monotonic() + call.pause_s > until:
            raise OpforgeError(f"no answer within {limit_s:g} s{f': {problem}' if problem else ''}")


def _detail(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return reply.text[:500]


def _body(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, str | bool) else list(value) for name, value in fields.items()}


def _headers(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


class Client:
    """A client of `opforge serve`. Threads may share it."""

    def __init__(self, url: str = DEFAULT_URL, *, token: str = "", limit_s: float = 3600.0) -> None:
        """Connect when first used; ``limit_s`` is the longest wait for an answer."""
        self._limit_s = limit_s
        self._http = httpx.Client(base_url=url, headers=_headers(token), timeout=_WAIT_S + 30)

    def judge(
        self,
        op: str,
        source: str,
        *,
        language: str = "python",
        cases: Sequence[str] = (),
        timed_cases: Sequence[str] = (),
        refused_cases: Sequence[str] = (),
        timed: bool = True,
        reward: str = "correct",
    ) -> JudgedKernel:
        """Judge a kernel, and wait for the answer."""
        given = {"cases": cases, "timed_cases": timed_cases, "refused_cases": refused_cases, "timed": timed}
        body = _body({"op": op, "source": source, "language": language, "reward": reward, **given})
        steps = _steps(body, self._limit_s)
        call = next(steps)
        while True:
            time.sleep(call.pause_s)
            try:
                reply: httpx.Response | httpx.TransportError = self._http.request(
                    call.method, call.path, json=call.body
                )
            except httpx.TransportError as error:
                reply = error
            try:
                call = steps.send(reply)
            except StopIteration as end:
                judged: JudgedKernel = end.value
                return judged

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class AsyncClient:
    """A client of `opforge serve` for asyncio."""

    def __init__(self, url: str = DEFAULT_URL, *, token: str = "", limit_s: float = 3600.0) -> None:
        """Connect when first used; ``limit_s`` is the longest wait for an answer."""
        self._limit_s = limit_s
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(base_url=url, headers=_headers(token), timeout=_WAIT_S + 30, limits=limits)

    async def judge(
        self,
        op: str,
        source: str,
        *,
        language: str = "python",
        cases: Sequence[str] = (),
        timed_cases: Sequence[str] = (),
        refused_cases: Sequence[str] = (),
        timed: bool = True,
        reward: str = "correct",
    ) -> JudgedKernel:
        """Judge a kernel, and wait for the answer."""
        given = {"cases": cases, "timed_cases": timed_cases, "refused_cases": refused_cases, "timed": timed}
        body = _body({"op": op, "source": source, "language": language, "reward": reward, **given})
        steps = _steps(body, self._limit_s)
        call = next(steps)
        while True:
            await asyncio.sleep(call.pause_s)
            try:
                reply = await self._http.request(call.method, call.path, json=call.body)
            except httpx.TransportError as error:
                call = steps.send(error)
                continue
            try:
                call = steps.send(reply)
            except StopIteration as end:
                judged: JudgedKernel = end.value
                return judged

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()
