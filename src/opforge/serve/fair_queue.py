"""A queue in which clients take turns: who sends a thousand requests does not delay who sends one."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque

from opforge.serve.request_store import StoredRequest


class FairQueue:
    """Requests that wait; each client's own come in the order in which they were sent."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._by_client: OrderedDict[str, deque[StoredRequest]] = OrderedDict()
        """The clients with waiting requests; the first one's turn is next."""
        self._closed = False

    def put(self, request: StoredRequest) -> None:
        with self._condition:
            self._by_client.setdefault(request.client, deque()).append(request)
            self._condition.notify()

    def take(self) -> StoredRequest | None:
        """Wait for a request; return None when the queue is closed."""
        with self._condition:
            self._condition.wait_for(lambda: self._by_client or self._closed)
            if self._closed:
                return None
            client, requests = self._by_client.popitem(last=False)
            request = requests.popleft()
            if requests:
                self._by_client[client] = requests  # behind all others
            return request

    def __len__(self) -> int:
        with self._condition:
            return sum(map(len, self._by_client.values()))

    def count_of(self, client: str) -> int:
        """Return how many requests of a client wait."""
        with self._condition:
            return len(self._by_client.get(client, ()))

    def close(self) -> None:
        """End all waits; what is left in the queue stays there."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
