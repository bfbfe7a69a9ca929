"""Requests and their answers, in a database that survives the end of the server at any time."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opforge.errors import OpforgeError
from opforge.serve.judge_request import JudgeRequest

QUEUED, DONE = "queued", "done"
_TABLE = """
CREATE TABLE IF NOT EXISTS request (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, client TEXT NOT NULL, digest TEXT NOT NULL,
    request TEXT NOT NULL, answer TEXT, received REAL NOT NULL, answered REAL
);
CREATE UNIQUE INDEX IF NOT EXISTS by_content ON request (client, digest);
CREATE TABLE IF NOT EXISTS begun (id TEXT PRIMARY KEY, times INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS waiting ON request (number) WHERE answer IS NULL;
"""


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A request that was accepted, and its answer, if it has one."""

    id: str
    client: str
    request: JudgeRequest
    answer: dict[str, Any] | None = None

    @property
    def state(self) -> str:
        return QUEUED if self.answer is None else DONE


class RequestStore:
    """The requests of all clients. An accepted request is on the disk before its client hears of it."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        try:
            self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=FULL")
            self._database.executescript(_TABLE)
        except sqlite3.Error as error:
            raise OpforgeError(
                f"{path} cannot be used as the store of requests: {error}; give another --data"
            ) from None

    def add(self, client: str, request: JudgeRequest, digest: str) -> StoredRequest:
        """Store a new request. On return it is on the disk."""
        identifier = uuid.uuid4().hex
        with self._transaction() as database:
            database.execute(
                "INSERT INTO request (id, client, digest, request, received) VALUES (?, ?, ?, ?, ?)",
                (identifier, client, digest, json.dumps(request.wire()), time.time()),
            )
        return StoredRequest(identifier, client, request)

    def find(self, client: str, digest: str) -> StoredRequest | None:
        """Return the client's request with this content, if it has sent one."""
        with self._lock:
            return self._select("client = ? AND digest = ?", client, digest)

    def get(self, client: str, identifier: str) -> StoredRequest | None:
        """Return a client's request; None if it has none of that id, whoever else may."""
        with self._lock:
            return self._select("client = ? AND id = ?", client, identifier)

    def begin(self, identifier: str) -> int:
        """Note that a request is being judged; return how often that was begun before and not ended."""
        with self._transaction() as database:
            database.execute(
                "INSERT INTO begun VALUES (?, 1) ON CONFLICT (id) DO UPDATE SET times = times + 1", (identifier,)
            )
            (times,) = database.execute("SELECT times FROM begun WHERE id = ?", (identifier,)).fetchone()
        return int(times) - 1

    def answer(self, identifier: str, answer: dict[str, Any]) -> None:
        """Store the answer to a request."""
        with self._transaction() as database:
            database.execute(
                "UPDATE request SET answer = ?, answered = ? WHERE id = ?",
                (json.dumps(answer), time.time(), identifier),
            )
            database.execute("DELETE FROM begun WHERE id = ?", (identifier,))

    def waiting(self) -> list[StoredRequest]:
        """Return the requests without an answer, the oldest first."""
        with self._lock:
            rows = self._database.execute(
                "SELECT id, client, request, answer FROM request WHERE answer IS NULL ORDER BY number"
            ).fetchall()
        return [_stored(row) for row in rows]

    def unfinished(self) -> set[str]:
        """Return the requests that a server was judging when it ended."""
        with self._lock:
            return {identifier for (identifier,) in self._database.execute("SELECT id FROM begun")}

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _select(self, condition: str, *values: str) -> StoredRequest | None:
        row = self._database.execute(
            f"SELECT id, client, request, answer FROM request WHERE {condition}",  # noqa: S608  # conditions of this file
            values,
        ).fetchone()
        return None if row is None else _stored(row)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")


def _stored(row: tuple[str, str, str, str | None]) -> StoredRequest:
    identifier, client, request, answer = row
    return StoredRequest(
        identifier, client, JudgeRequest.from_wire(json.loads(request)), None if answer is None else json.loads(answer)
    )
