"""Transcripts: requests and replies as JSON lines, recorded live and replayed without a model."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from opforge.errors import OpforgeError
from opforge.generate.connection import ProviderOptions
from opforge.generate.provider import FREE_PROVIDER, Provider, ProviderError, Reply, Request, Usage, silent


def request_digest(request: Request) -> str:
    """Return a digest of everything that is sent, to identify a request."""
    text = json.dumps(asdict(request), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class RecordingProvider:
    """A provider that records requests and replies, each on disk before its reply is returned."""

    def __init__(self, provider: Provider, path: Path) -> None:
        self.name = provider.name
        self._provider = provider
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab+")
        except OSError as error:
            raise OpforgeError(f"the transcript {str(path)!r} cannot be written: {error.strerror}") from None
        _drop_partial_line(self._file)

    def ask(self, request: Request, waiting: Callable[[str], None] = silent) -> Reply:
        """Ask the provider, and record the reply."""
        reply = self._provider.ask(request, waiting)
        row = {"digest": request_digest(request), "request": asdict(request), "reply": asdict(reply)}
        with self._lock:
            self._file.write(json.dumps(row).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        return reply

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(slots=True)
class _RecordedReply:
    number: int
    digest: str
    contains: tuple[str, ...]
    reply: Reply
    used: bool = False

    def fits(self, text: str) -> bool:
        return not self.used and bool(self.contains) and all(part in text for part in self.contains)


class TranscriptProvider:
    """A transcript (--transcript FILE) replayed: equal requests get their replies in the order of the file.

    A line has the ``digest`` of the request that it answers. A line written by hand may have
    ``contains`` instead: a list of texts that occur in the system prompt and messages. This is for
    requests that are not identical on every machine.
    """

    name = FREE_PROVIDER

    def __init__(self, options: ProviderOptions) -> None:
        if options.transcript is None:
            raise ProviderError("provider 'transcript' needs a file to replay; give --transcript FILE")
        self._path = options.transcript
        self._lines = list(_read(self._path))
        self._lock = threading.Lock()

    def ask(self, request: Request, waiting: Callable[[str], None] = silent) -> Reply:  # noqa: ARG002  # never waits
        """Return the recorded reply."""
        key, text = request_digest(request), _text(request)
        with self._lock:
            line = next((row for row in self._lines if row.digest == key and not row.used), None)
            line = line or next((row for row in self._lines if row.fits(text)), None)
            if line is None:
                raise ProviderError(self._missing_reply_message(key, request))
            line.used = True
            return line.reply

    def close(self) -> None:
        """Do nothing; other providers need closing."""

    def _missing_reply_message(self, key: str, request: Request) -> str:
        known = Counter(line.digest for line in self._lines if line.digest)
        last = " ".join(request.messages[-1].text.split())[:80] if request.messages else ""
        asked = (
            f"the request {key[:12]} (model {request.model!r}, {len(request.messages)} messages, the last one {last!r})"
        )
        if key in known:
            return (
                f"{self._path} answers {asked} {known[key]} times, and one more request was made; "
                "record the transcript again"
            )
        return (
            f"{self._path} has no answer to {asked}; it holds {len(self._lines)} replies, to other requests: "
            "replay it with the model, prompts and settings of its recording, or record it again"
        )


def _text(request: Request) -> str:
    return "\n".join((request.system, *(message.text for message in request.messages)))


def _read(path: Path) -> Iterator[_RecordedReply]:
    """Yield the lines of a transcript; skip a partial last line of a killed process."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ProviderError(f"the transcript {str(path)!r} cannot be read: {error.strerror}") from None
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        if not line.strip():
            continue
        try:
            yield _line(number, json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            if not line.endswith(b"\n"):
                return
            raise ProviderError(
                f"{path}, line {number} is not a line of a transcript ({type(error).__name__}: {error}); expected "
                '{"digest": … or "contains": [texts], "reply": {"text": …}}'
            ) from None


def _line(number: int, row: Mapping[str, Any]) -> _RecordedReply:
    reply_row = row["reply"]
    usage = reply_row.get("usage") or {}
    reply_usage = Usage(usage.get("input_tokens", 0), usage.get("output_tokens", 0), 0.0)  # a replay costs nothing
    contains = row.get("contains", [])
    if isinstance(contains, str) or not (row.get("digest") or contains):
        raise ValueError("neither digest nor list of texts")
    return _RecordedReply(
        number,
        row.get("digest", ""),
        tuple(contains),
        Reply(str(reply_row["text"]), reply_usage, reply_row.get("stop", "end")),
    )


def _drop_partial_line(file: Any) -> None:
    """Cut off a partial last line."""
    file.seek(0)
    data = file.read()
    file.truncate(data.rfind(b"\n") + 1)
