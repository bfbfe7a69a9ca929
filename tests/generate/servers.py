"""Loopback servers that speak the protocols of Anthropic and OpenAI, and say what a script tells them to.

    with AnthropicServer([Status(429, retry_after="0"), Say("the reply")]) as server:
        ...  # ask at server.url
        assert server.requests[0].body["model"] == "claude-sonnet-4-5"

A script is a list of steps, one for each request that comes, or a function from a request to a step. A list that is at its end is
answered with status 400, which no client tries again; ``itertools.repeat(step)`` has no end.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Self

from tests.generate.steps import Cut, Drop, Fail, Hang, Say, Script, Seen, Status, Step

PIECE = 24
"""How many characters of a reply come in one event."""


class ModelServer:
    """What both protocols have in common: a server on a free port of this machine, from ``with`` to the end of the block."""

    def __init__(self, script: Script, key: str | None = None) -> None:
        self._script: Callable[[Seen], Step] = script if callable(script) else _in_order(iter(script))
        self._key = key
        """The only key that is let in; None for any."""
        self.requests: list[Seen] = []
        self.busy = 0
        self.busy_most = 0
        """How many requests were being answered at once, now and at most."""
        self.closing = threading.Event()
        self.lock = threading.Lock()

    def __enter__(self) -> Self:
        self._http = _Http(self)
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._http.shutdown()
        self._thread.join()
        self._http.hang_up()
        self._http.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}{self.prefix}"

    prefix = ""
    path = ""

    def next_step(self, seen: Seen) -> Step:
        """Record a request and say what comes next; requests that the real server would refuse are refused here."""
        with self.lock:
            self.requests.append(seen)
            if seen.path != self.path:
                return Status(404, f"there is no {seen.path}")
            if not seen.key or (self._key is not None and seen.key != self._key):
                return Status(401, f"invalid key: {seen.key}")
            if fault := self.fault(seen):
                return Status(400, fault)
            return self._script(seen)

    @abstractmethod
    def key_of(self, headers: dict[str, str]) -> str: ...

    @abstractmethod
    def fault(self, seen: Seen) -> str:
        """Say what is wrong with a request; empty for nothing."""

    @abstractmethod
    def whole(self, seen: Seen, say: Say) -> dict[str, Any]:
        """Return the reply as one JSON object."""

    @abstractmethod
    def opening(self, seen: Seen, step: Say | Cut | Fail | Hang) -> Iterator[str]:
        """Yield the events of a stream up to the end of the step's text."""

    @abstractmethod
    def ending(self, seen: Seen, say: Say) -> Iterator[str]:
        """Yield the events that end a stream."""

    @abstractmethod
    def error_body(self, status: int, message: str) -> dict[str, Any]: ...

    @abstractmethod
    def error_event(self, fail: Fail) -> str: ...

    sign_of_life = ": \n\n"


class AnthropicServer(ModelServer):
    """The Messages protocol, streamed and whole."""

    path = "/v1/messages"
    sign_of_life = 'event: ping\ndata: {"type": "ping"}\n\n'
    _errors: ClassVar = {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        500: "api_error",
        529: "overloaded_error",
    }

    def key_of(self, headers: dict[str, str]) -> str:
        return headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")

    def fault(self, seen: Seen) -> str:
        if "anthropic-version" not in seen.headers:
            return "anthropic-version: header is required"
        if (missing := {"model", "max_tokens", "messages"} - seen.body.keys()) or not seen.body["messages"]:
            return f"{', '.join(sorted(missing)) or 'messages'}: Field required"
        if any(message["role"] not in ("user", "assistant") for message in seen.body["messages"]):
            return "messages: Input should be 'user' or 'assistant'; the system prompt is a parameter of its own"
        return ""

    def whole(self, seen: Seen, say: Say) -> dict[str, Any]:
        return {
            **self._message(seen, say.input_tokens),
            "content": [{"type": "text", "text": say.text}],
            "stop_reason": say.stop or "end_turn",
            "usage": {"input_tokens": say.input_tokens, "output_tokens": say.output_tokens},
        }

    def _message(self, seen: Seen, input_tokens: int) -> dict[str, Any]:
        return {
            "id": f"msg_{len(self.requests)}",
            "type": "message",
            "role": "assistant",
            "model": seen.body["model"],
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": input_tokens, "output_tokens": 1},
        }

    def opening(self, seen: Seen, step: Say | Cut | Fail | Hang) -> Iterator[str]:
        input_tokens = step.input_tokens if isinstance(step, Say | Cut) else 100
        yield self._event("message_start", message=self._message(seen, input_tokens))
        yield self._event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        yield self.sign_of_life
        for piece in _pieces(step.text):
            yield self._event("content_block_delta", index=0, delta={"type": "text_delta", "text": piece})

    def ending(self, seen: Seen, say: Say) -> Iterator[str]:
        delta = {"stop_reason": say.stop or "end_turn", "stop_sequence": None}
        yield self._event("content_block_stop", index=0)
        yield self._event("message_delta", delta=delta, usage={"output_tokens": say.output_tokens})
        yield self._event("message_stop")

    def error_body(self, status: int, message: str) -> dict[str, Any]:
        error = {"type": self._errors.get(status, "api_error"), "message": message}
        return {"type": "error", "error": error, "request_id": "req_1"}

    def error_event(self, fail: Fail) -> str:
        return self._event("error", error={"type": fail.kind, "message": fail.message})

    @staticmethod
    def _event(kind: str, **fields: Any) -> str:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


class OpenAIServer(ModelServer):
    """The Chat Completions protocol, streamed and whole."""

    prefix = "/v1"
    path = "/v1/chat/completions"

    def key_of(self, headers: dict[str, str]) -> str:
        return headers.get("authorization", "").removeprefix("Bearer ")

    def fault(self, seen: Seen) -> str:
        if missing := {"model", "messages"} - seen.body.keys():
            return f"you must provide a {' and a '.join(sorted(missing))} parameter"
        if any(m["role"] not in ("system", "developer", "user", "assistant") for m in seen.body["messages"]):
            return "invalid value for 'role'"
        if "stream_options" in seen.body and not seen.body.get("stream"):
            return "the 'stream_options' parameter is only allowed when 'stream' is enabled"
        return ""

    def whole(self, seen: Seen, say: Say) -> dict[str, Any]:
        message = {"role": "assistant", "content": say.text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": say.stop or "stop"}
        return {**self._head(seen, "chat.completion"), "choices": [choice], "usage": self._usage(say)}

    def _head(self, seen: Seen, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{len(self.requests)}", "object": kind, "created": 0, "model": seen.body["model"]}

    @staticmethod
    def _usage(say: Say) -> dict[str, int]:
        total = say.input_tokens + say.output_tokens
        return {"prompt_tokens": say.input_tokens, "completion_tokens": say.output_tokens, "total_tokens": total}

    def _chunk(self, seen: Seen, delta: dict[str, Any], finish: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return self._data({**self._head(seen, "chat.completion.chunk"), "choices": [choice]})

    def opening(self, seen: Seen, step: Say | Cut | Fail | Hang) -> Iterator[str]:
        yield self._chunk(seen, {"role": "assistant", "content": ""})
        for piece in _pieces(step.text):
            yield self._chunk(seen, {"content": piece})

    def ending(self, seen: Seen, say: Say) -> Iterator[str]:
        yield self._chunk(seen, {}, say.stop or "stop")
        if say.usage and (seen.body.get("stream_options") or {}).get("include_usage"):
            head = self._head(seen, "chat.completion.chunk")
            yield self._data({**head, "choices": [], "usage": self._usage(say)})
        yield "data: [DONE]\n\n"

    def error_body(self, status: int, message: str) -> dict[str, Any]:
        kind = "server_error" if status >= 500 else "requests" if status == 429 else "invalid_request_error"
        code = "rate_limit_exceeded" if status == 429 else None
        return {"error": {"message": message, "type": kind, "param": None, "code": code}}

    def error_event(self, fail: Fail) -> str:
        return self._data({"error": {"message": fail.message, "type": fail.kind, "param": None, "code": None}})

    @staticmethod
    def _data(fields: dict[str, Any]) -> str:
        return f"data: {json.dumps(fields)}\n\n"


class _Http(ThreadingHTTPServer):
    """The listening socket, and the connections that are open."""

    daemon_threads = False
    block_on_close = True
    request_queue_size = 128

    def __init__(self, model: ModelServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model = model
        self._open: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.model.lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self.model.lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        """End what is still open, so that no thread waits for a client that has gone to sleep."""
        with self.model.lock:
            for connection in self._open:
                _shut(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client may leave at any time."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Http

    def do_POST(self) -> None:
        model = self.server.model
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        headers = {name.lower(): value for name, value in self.headers.items()}
        seen = Seen(self.path, headers, body, time.monotonic(), model.key_of(headers))
        with model.lock:
            model.busy += 1
            model.busy_most = max(model.busy_most, model.busy)
        try:
            self._take(model, seen, model.next_step(seen))
        finally:
            with model.lock:
                model.busy -= 1

    def _take(self, model: ModelServer, seen: Seen, step: Step) -> None:
        if isinstance(step, Drop):
            self._end()
        elif isinstance(step, Status):
            more = [*step.headers, *([("Retry-After", step.retry_after)] if step.retry_after is not None else [])]
            self._json(step.status, model.error_body(step.status, step.message), more)
        elif isinstance(step, Hang) and not step.text and not step.drip_s:
            model.closing.wait()
            self._end()
        elif isinstance(step, Say) and not seen.body.get("stream"):
            model.closing.wait(step.delay_s)
            self._json(200, model.whole(seen, step))
        else:
            self._stream(model, seen, step)

    def _stream(self, model: ModelServer, seen: Seen, step: Say | Cut | Fail | Hang) -> None:
        if isinstance(step, Say):
            model.closing.wait(step.delay_s)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        shown = step if isinstance(step, Say) else replace(step, text=step.text[: len(step.text) // 2])
        for event in model.opening(seen, shown):
            self._send(event)
        if isinstance(step, Say):
            for event in model.ending(seen, step):
                self._send(event)
        elif isinstance(step, Fail):
            self._send(model.error_event(step))
        elif isinstance(step, Hang):
            while not model.closing.wait(step.drip_s or None):
                self._send(model.sign_of_life)
        if isinstance(step, Say | Fail) or (isinstance(step, Cut) and step.clean):
            self._send("")
        else:
            self._end(reset=isinstance(step, Cut) and step.reset)

    def _send(self, text: str) -> None:
        """Send one chunk; the empty one is the last."""
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _json(self, status: int, fields: dict[str, Any], headers: Iterable[tuple[str, str]] = ()) -> None:
        data = json.dumps(fields).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _end(self, reset: bool = False) -> None:
        self.close_connection = True
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())
        else:
            _shut(self.connection)

    def log_message(self, *_: object) -> None:
        pass


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side may have been first
        connection.shutdown(socket.SHUT_RDWR)


def _in_order(steps: Iterator[Step]) -> Callable[[Seen], Step]:
    return lambda _seen: next(steps, Status(400, "the script of this server is at its end"))


def _pieces(text: str) -> Iterator[str]:
    return (text[at : at + PIECE] for at in range(0, len(text), PIECE))
