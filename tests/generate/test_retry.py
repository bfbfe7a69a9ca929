"""Waits between tries, and how long a server asks for."""

from __future__ import annotations

import time
from email.utils import formatdate

import pytest

from opforge.errors import OpforgeError
from opforge.generate.provider import ProviderError, Reply, Usage, silent
from opforge.generate.retry import RetryPolicy, TryFailedError, ask_with_retries, retry_after_s


def test_waits_double_up_to_a_bound_and_are_spread() -> None:
    retries = RetryPolicy(first_wait_s=1, max_wait_s=8)
    for failed, full in ((1, 1), (2, 2), (3, 4), (4, 8), (5, 8), (60, 8)):
        waits = {retries.wait_s(failed) for _ in range(50)}
        assert all(full / 2 <= wait <= full for wait in waits)
        assert len(waits) > 10


def test_a_server_is_given_the_time_it_asks_for_within_a_bound() -> None:
    retries = RetryPolicy(max_server_wait_s=30)
    assert all(10 <= retries.wait_s(1, 10) <= 12.5 for _ in range(50))
    assert all(30 <= retries.wait_s(1, 1e9) <= 37.5 for _ in range(50))
    assert retries.wait_s(5, 0) == 0


def test_retry_after_in_all_its_forms() -> None:
    assert retry_after_s({"retry-after": "3"}) == 3
    assert retry_after_s({"retry-after": "1.5"}) == 1.5
    assert retry_after_s({"retry-after-ms": "250", "retry-after": "1"}) == 0.25
    date = retry_after_s({"retry-after": formatdate(time.time() + 3600, usegmt=True)})
    assert date is not None
    assert 3000 < date <= 3601
    assert retry_after_s({"retry-after": formatdate(time.time() - 3600, usegmt=True)}) == 0
    for words in ({}, {"retry-after": "soon"}, {"retry-after": "-5"}, {"retry-after": "nan"}, {"retry-after": "inf"}):
        assert retry_after_s(words) is None


def test_what_failed_tries_took_is_in_the_reply_and_in_the_error() -> None:
    took = Usage(100, 10, 0.5)
    fates = [TryFailedError("cut", retryable=True, usage=took), TryFailedError("cut", retryable=True, usage=took)]

    def once() -> Reply:
        if fates:
            raise fates.pop()
        return Reply("yes", Usage(1, 2, 0.25), "end")

    assert ask_with_retries(once, "p", RetryPolicy(), silent, silent).usage == Usage(201, 22, 1.25)
    fates = [TryFailedError("cut", retryable=True, usage=took)] * 3
    with pytest.raises(ProviderError, match=r"p: cut \(tried 3 times\); wait a while") as caught:
        ask_with_retries(once, "p", RetryPolicy(max_tries=3), silent, silent)
    assert caught.value.usage == Usage(300, 30, 1.5)


def test_no_tries_at_all() -> None:
    with pytest.raises(OpforgeError, match="at least once"):
        RetryPolicy(max_tries=0)
