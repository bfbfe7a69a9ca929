"""Retries: which errors of an SDK may be retried, how often, after how long, and the final error."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Any

from opforge.errors import OpforgeError
from opforge.generate.provider import NO_USAGE, ProviderError, Reply, Usage

_MAX_MESSAGE_CHARS = 600
"""Maximum length of a server's message, in characters."""
_RETRYABLE_STATUSES = frozenset({408, 409, 425, 429})
_NO_CREDIT_KINDS = frozenset({"insufficient_quota", "billing_error"})
"""Error kinds that come with a rate-limit status but that no retry fixes."""
_FINAL_KINDS = _NO_CREDIT_KINDS | {
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
}
"""Error kinds that no retry fixes, for errors without a status in a stream that began well."""


class TryFailedError(Exception):
    """One try failed."""

    def __init__(
        self,
        message: str,
        *,
        retryable: bool,
        retry_after_s: float | None = None,
        advice: str = "",
        usage: Usage = NO_USAGE,
    ) -> None:
        super().__init__(message)
        self.retryable = retryable
        """Whether a retry may succeed."""
        self.retry_after_s = retry_after_s
        """Seconds that the server asks us to wait."""
        self.advice = advice
        self.usage = usage


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Number of tries, and the waits between them.

    A wait doubles with each try up to a limit, and is randomised.
    """

    max_tries: int = 6
    first_wait_s: float = 1.0
    max_wait_s: float = 60.0
    max_server_wait_s: float = 120.0
    """Maximum wait, if the server asks for a longer one."""

    def __post_init__(self) -> None:
        if self.max_tries < 1:
            raise OpforgeError(f"a request must be tried at least once, not {self.max_tries} times")

    def wait_s(self, failed: int, retry_after_s: float | None = None) -> float:
        """Return the seconds to wait after this many failed tries.

        If the server asks for a wait, it is at least that long, up to ``max_server_wait_s``.
        """
        if retry_after_s is not None:
            return min(retry_after_s, self.max_server_wait_s) * random.uniform(1.0, 1.25)  # noqa: S311  # not a secret
        return min(self.first_wait_s * 2.0 ** (failed - 1), self.max_wait_s) * random.uniform(0.5, 1.0)  # noqa: S311


def ask_with_retries(
    try_once: Callable[[], Reply],
    name: str,
    retries: RetryPolicy,
    waiting: Callable[[str], None],
    sleep: Callable[[float], object],
) -> Reply:
    """Return the first reply; its usage includes that of the failed tries.

    The error that is raised if all tries fail includes it too.
    """
    spent = NO_USAGE
    for number in range(1, retries.max_tries + 1):
        try:
            reply = try_once()
        except TryFailedError as error:
            failed = error
        else:
            return replace(reply, usage=spent + reply.usage)
        spent += failed.usage
        if not failed.retryable or number == retries.max_tries:
            break
        wait_s = retries.wait_s(number, failed.retry_after_s)
        waiting(f"{name}: {failed}; trying again in {wait_s:.1f} s ({number} of {retries.max_tries} tries)")
        sleep(wait_s)
    times = f" (tried {number} times)" if number > 1 else ""
    advice = failed.advice or ("wait a while, then continue with --resume" if failed.retryable else "")
    raise ProviderError(f"{name}: {failed}{times}{'; ' if advice else ''}{advice}", spent)


class SdkErrors:
    """Interprets the errors of one SDK; Anthropic's and OpenAI's have the same classes."""

    def __init__(self, sdk: Any, scrub: Callable[[str], str], key_variable: str) -> None:
        self._sdk = sdk
        self._scrub = scrub
        self._key_variable = key_variable

    def to_failure(self, error: Exception, model: str) -> TryFailedError | None:
        """Return the failure that an error means; None if it is not from the server or network."""
        if isinstance(error, self._sdk.APIStatusError):
            return self._status(error, model)
        if isinstance(error, self._sdk.APITimeoutError) or _is_http_error(error, "TimeoutException"):
            return TryFailedError("no answer in time", retryable=True)
        if isinstance(error, self._sdk.APIConnectionError):
            return TryFailedError(self._clean(f"no connection ({_root_cause(error)})"), retryable=True)
        if isinstance(error, self._sdk.APIError):
            again = not _kinds(error) & _FINAL_KINDS
            return TryFailedError(
                self._clean(f"the server interrupted the reply: {_error_message(error)}"), retryable=again
            )
        if _is_http_error(error, "TransportError"):
            return TryFailedError(self._clean(f"the reply was interrupted ({error})"), retryable=True)
        if isinstance(error, ValueError):
            return TryFailedError(self._clean(f"the reply does not follow the protocol ({error})"), retryable=True)
        return None

    def _status(self, error: Any, model: str) -> TryFailedError:
        status, kinds = int(error.status_code), _kinds(error)
        if status < 400:  # the error came as an event of the stream
            return TryFailedError(
                self._clean(f"the server interrupted the reply: {_error_message(error)}"),
                retryable=not kinds & _FINAL_KINDS,
            )
        again = (status in _RETRYABLE_STATUSES or status >= 500) and not kinds & _NO_CREDIT_KINDS
        advice = "the account has no credit left" if kinds & _NO_CREDIT_KINDS else self._advice(status, model)
        asked_s = retry_after_s(error.response.headers) if again else None
        return TryFailedError(
            self._clean(f"status {status}: {_error_message(error)}"),
            retryable=again,
            retry_after_s=asked_s,
            advice=advice,
        )

    def _advice(self, status: int, model: str) -> str:
        advice = {
            401: f"check the key in {self._key_variable}",
            403: f"check what the key in {self._key_variable} may do",
            404: f"check the name of the model ({model!r}) and the address",
            413: "the prompt is too long",
        }
        return advice.get(status, "")

    def _clean(self, text: str) -> str:
        clean = self._scrub(" ".join(text.split()))
        return clean if len(clean) <= _MAX_MESSAGE_CHARS else clean[:_MAX_MESSAGE_CHARS] + " …"


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds to wait that a server asks for, given in ms, in seconds or as a date."""
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            wait_s = float(headers.get(name, "")) * unit_s
        except ValueError:
            continue
        if 0 <= wait_s < float("inf"):
            return wait_s
    try:
        return max(0.0, parsedate_to_datetime(headers.get("retry-after", "")).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def _is_http_error(error: Exception, name: str) -> bool:
    """Whether an error comes from the HTTP library below the SDK: httpx or its successor."""
    return any(cls.__name__ == name and cls.__module__.startswith("httpx") for cls in type(error).__mro__)


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__


def _error_details(error: Any) -> Mapping[str, Any]:
    """Return the server's error details; Anthropic wraps them, OpenAI's SDK has unwrapped them."""
    body = error.body
    inner = body.get("error", body) if isinstance(body, dict) else {}
    return inner if isinstance(inner, dict) else {}


def _error_message(error: Any) -> str:
    return str(_error_details(error).get("message") or error)


def _kinds(error: Any) -> set[str]:
    """Return the server's names for the kind of error."""
    detail = _error_details(error)
    return {str(detail[name]) for name in ("code", "type") if detail.get(name)}
