"""The requests of all clients: accepted, stored, judged in fair turns, answered once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from opforge.errors import InternalError, OpforgeError
from opforge.serve.fair_queue import FairQueue
from opforge.serve.judge_request import JudgeRequest
from opforge.serve.kernel_judge import KernelJudge
from opforge.serve.request_store import RequestStore, StoredRequest

_LOG = logging.getLogger(__name__)
STORE = "requests.sqlite"
_MAX_UNFINISHED = 3
"""A request is given up after so many servers have ended while they judged it."""


class TooManyRequestsError(OpforgeError):
    """A client has as many requests waiting as it may have."""


class RequestService:
    """Judges requests in threads of its own.

    Each accepted request is in the store until it is answered, so a server that is killed goes on
    with it when it is started again. One of those that it was judging may have ended it: these are
    judged first, one at a time.
    """

    def __init__(self, judge: KernelJudge, folder: Path, *, max_pending: int) -> None:
        self.judge = judge
        self._max_pending = max_pending
        self._settings_digest = judge.settings_digest
        self.store = RequestStore(folder / STORE)
        self._queue = FairQueue()
        self._lock = threading.Lock()
        self._answers: dict[str, Future[StoredRequest]] = {}
        """Requests that wait or are being judged, by id."""
        self.answered = 0
        self.failed = 0
        """Answers that are errors, of the requests answered since the start."""
        self._closing = False
        unfinished = self.store.unfinished()
        suspects = [request for request in self.store.waiting() if request.id in unfinished]
        for request in suspects:
            self._answers[request.id] = Future()
        for request in self.store.waiting():
            if request.id not in unfinished:
                self._enqueue(request)
        self._may_start = threading.Event()
        # one more than judges: while one kernel's files are written, the judges have work
        names = [f"requests-{number}" for number in range(judge.workers + 1)]
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for name in names[1:]]
        self._threads += [threading.Thread(target=self._work, args=[suspects], name=names[0], daemon=True)]
        for thread in self._threads:
            thread.start()

    def submit(self, client: str, request: JudgeRequest) -> StoredRequest:
        """Accept a request: it is answered sooner or later. Raises if it cannot be judged."""
        self.judge.check(request)
        digest = request.digest(self._settings_digest)
        with self._lock:  # one after the other: nothing is stored twice, and the limit holds
            if (known := self.store.find(client, digest)) is not None:
                return known
            if self._queue.count_of(client) >= self._max_pending:
                raise TooManyRequestsError(
                    f"{self._max_pending} requests of this client are waiting, which is the limit; send this one "
                    "again when some are answered"
                )
            stored = self.store.add(client, request, digest)
            self._enqueue(stored)
        return stored

    def answer(self, stored: StoredRequest) -> Future[StoredRequest]:
        """Return a future of the answered request."""
        with self._lock:
            if (future := self._answers.get(stored.id)) is not None:
                return future
        done: Future[StoredRequest] = Future()
        done.set_result(self.store.get(stored.client, stored.id) or stored)
        return done

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def pending(self) -> int:
        """Return how many requests wait or are being judged."""
        return len(self._answers)

    @property
    def is_alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Finish what is being judged; what waits stays in the store for the next start."""
        self._closing = True
        self._queue.close()
        for thread in self._threads:
            thread.join()
        self.store.close()

    def _enqueue(self, stored: StoredRequest) -> None:
        self._answers[stored.id] = Future()
        self._queue.put(stored)

    def _work(self, suspects: Sequence[StoredRequest] | None = None) -> None:
        """Judge what waits; the thread that is given suspects judges them first, while the others wait."""
        if suspects is None:
            self._may_start.wait()
        for stored in suspects or ():
            if self._closing or not self._process(stored):
                break
        self._may_start.set()
        while (stored_next := self._queue.take()) is not None and self._process(stored_next):
            pass

    def _process(self, stored: StoredRequest) -> bool:
        """Judge a request and answer it; return whether others can be judged after it."""
        try:
            answer = self._judged(stored)
        except Exception as error:  # noqa: BLE001  # one request must not end the others
            _LOG.exception("request %s could not be judged", stored.id)
            if self.judge.service.has_ended:  # the request stays in the store, for the next start
                return False
            answer = _no_verdict(f"internal error: {type(error).__name__}: {error}")
        self.store.answer(stored.id, answer)
        with self._lock:
            self.answered += 1
            self.failed += "error" in answer
            future = self._answers.pop(stored.id)
        future.set_result(replace(stored, answer=answer))
        return True

    def _judged(self, stored: StoredRequest) -> dict[str, Any]:
        if (ended := self.store.begin(stored.id)) >= _MAX_UNFINISHED:
            return _no_verdict(f"{ended} servers ended while they judged this request; it is not judged again")
        try:
            return self.judge.judge(stored)
        except InternalError:
            raise
        except OpforgeError as error:
            return _no_verdict(str(error))


def _no_verdict(problem: str) -> dict[str, Any]:
    return {"right": False, "reward": 0.0, "error": problem}
