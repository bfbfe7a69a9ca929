"""The HTTP interface. FastAPI describes it at /docs and /openapi.json."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, HTTPException, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import ConfigDict
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from opforge import __version__
from opforge.errors import InternalError, OpforgeError
from opforge.serve.judge_request import JudgeRequest
from opforge.serve.request_store import StoredRequest
from opforge.serve.service import RequestService, TooManyRequestsError
from opforge.serve.tokens import Tokens

MAX_WAIT_S = 300.0
_RETRY_AFTER_S = 5
_HEARTBEAT_S = 10.0


@dataclass(frozen=True)
class JudgeBody:
    """A kernel to judge. Without cases, those of the server's suite are used."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    op: str
    source: str
    language: str = "python"
    cases: list[str] = field(default_factory=list)
    timed_cases: list[str] = field(default_factory=list)
    refused_cases: list[str] = field(default_factory=list)
    timed: bool = True
    reward: str = "correct"

    def request(self) -> JudgeRequest:
        return JudgeRequest.from_wire(asdict(self))


@dataclass(frozen=True)
class RequestState:
    """A request and, once it is judged, its answer."""

    id: str
    state: str
    """``queued`` (waiting or being judged) or ``done``."""
    answer: dict[str, Any] | None = None

    @classmethod
    def of(cls, stored: StoredRequest) -> RequestState:
        return cls(stored.id, stored.state, stored.answer)


def _client(request: Request, authorization: Annotated[str | None, Header()] = None) -> str:
    """Return the client that sends a request, by its token."""
    name: str | None = request.app.state.tokens.client(authorization)
    if name is None:
        raise HTTPException(
            401, "unknown token; send the header Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"}
        )
    return name


Client = Annotated[str, Depends(_client)]
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Seconds to wait for the answer.")]


class BodyLimits:
    """Refuses bodies that are too large, and clients that take too long to send one."""

    def __init__(self, app: ASGIApp, max_bytes: int, limit_s: float) -> None:
        self._app, self._max_bytes, self._limit_s = app, max_bytes, limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, send)
            return
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(self._limit_s):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        return  # the client has gone
                    parts.append(message.get("body", b""))
                    if sum(map(len, parts)) > self._max_bytes:
                        await _refuse(413, f"the body has more than {self._max_bytes} bytes")(scope, receive, send)
                        return
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            await _refuse(408, f"the body was not complete after {self._limit_s:g} s")(scope, receive, send)
            return
        body: list[Message] = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]

        async def replay() -> Message:
            return body.pop() if body else await receive()

        await self._app(scope, replay, send)


def _refuse(status: int, problem: str) -> JSONResponse:
    return JSONResponse({"detail": problem}, status, headers={"Connection": "close"})


def make_app(service: RequestService, tokens: Tokens, *, max_bytes: int, body_limit_s: float = 30.0) -> FastAPI:
    """Return the application for a service that is running."""
    app = FastAPI(title="opforge", version=__version__, description="Judge PyTorch operator kernels.")
    app.state.tokens = tokens
    app.add_middleware(BodyLimits, max_bytes=max_bytes, limit_s=body_limit_s)

    @app.exception_handler(OpforgeError)
    async def cannot_be_judged(_request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, TooManyRequestsError):
            return JSONResponse({"detail": str(error)}, 429, headers={"Retry-After": str(_RETRY_AFTER_S)})
        return JSONResponse({"detail": str(error)}, 500 if isinstance(error, InternalError) else 400)

    @app.post("/judge", responses={202: {"description": "Not answered yet; ask /requests/{id}"}})
    async def judge(body: JudgeBody, client: Client, wait: Wait = 60.0) -> JSONResponse:
        """Judge a kernel. The same request of a client is judged once, and answered from the store after that."""
        stored = await asyncio.to_thread(service.submit, client, body.request())
        return await _answer(service, stored, wait)

    @app.get("/requests/{identifier}")
    async def request(identifier: str, client: Client, wait: Wait = 0.0) -> JSONResponse:
        """Return a request of this client, with its answer if there is one."""
        return await _answer(service, _own(service, client, identifier), wait)

    @app.get("/requests/{identifier}/events")
    async def events(identifier: str, client: Client) -> StreamingResponse:
        """Send a request's state as server-sent events, until it is answered."""
        stored = _own(service, client, identifier)
        return StreamingResponse(_events(service, stored), media_type="text/event-stream")

    @app.get("/health")
    async def health() -> JSONResponse:
        """Say whether requests are being judged."""
        alive = service.is_alive
        return JSONResponse({"status": "ok" if alive else "judging has ended"}, 200 if alive else 503)

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        """Return counts in the text format of Prometheus."""
        from prometheus_client import CollectorRegistry, Gauge, generate_latest

        registry = CollectorRegistry()
        for name, text, value in (
            ("opforge_requests_waiting", "Requests that wait for a judge.", service.waiting),
            ("opforge_requests_pending", "Requests that wait or are being judged.", service.pending),
            ("opforge_requests_answered", "Requests answered since the start.", service.answered),
            (
                "opforge_requests_failed",
                "Requests answered with an error since the start.",
                service.failed,
            ),
        ):
            Gauge(name, text, registry=registry).set(value)
        return PlainTextResponse(generate_latest(registry), media_type="text/plain; version=0.0.4")

    return app


def _own(service: RequestService, client: str, identifier: str) -> StoredRequest:
    if (stored := service.store.get(client, identifier)) is None:
        raise HTTPException(404, f"this client has no request {identifier!r}")
    return stored


async def _answer(service: RequestService, stored: StoredRequest, wait_s: float) -> JSONResponse:
    """Return a request when it is answered, or after some seconds as it is then."""
    if stored.answer is None:
        future = asyncio.wrap_future(service.answer(stored))
        try:
            stored = await asyncio.wait_for(asyncio.shield(future), wait_s)
        except TimeoutError:
            return JSONResponse(asdict(RequestState.of(stored)), 202, headers={"Location": f"/requests/{stored.id}"})
    return JSONResponse(asdict(RequestState.of(stored)))


async def _events(service: RequestService, stored: StoredRequest) -> AsyncIterator[str]:
    while stored.answer is None:
        yield _event(stored)
        future = asyncio.wrap_future(service.answer(stored))
        try:
            stored = await asyncio.wait_for(asyncio.shield(future), _HEARTBEAT_S)
        except TimeoutError:
            continue
    yield _event(stored)


def _event(stored: StoredRequest) -> str:
    return f"event: {stored.state}\ndata: {json.dumps(asdict(RequestState.of(stored)))}\n\n"
