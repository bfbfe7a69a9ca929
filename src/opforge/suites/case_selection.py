"""Choose among the calls of a trace: by size limit, by largest weight, or as a weighted sample."""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from opforge.errors import OpforgeError, check_range
from opforge.traces.trace_file import TracedCall

_ARENA_BYTES = 1 << 30
"""Bytes in a worker's arena for the inputs of a case; the results have the same amount."""
_MAX_CASES = 100_000
_MIN_CASE_MIB, _MAX_CASE_MIB = 0.000_001, 1 << 20


@dataclass(frozen=True, slots=True)
class Profile:
    """Size limits of a case."""

    max_bytes: int
    """Limit for the inputs, and separately for the results."""
    max_flops: float


PROFILES = {"small": Profile(32 << 20, 2e9), "full": Profile(256 << 20, math.inf)}
"""``small`` takes two CPU cores well under a second; ``full`` is several times a GPU's caches."""


@dataclass(frozen=True, slots=True)
class CaseSelection:
    """The user's selection from a suite whose cases have weights."""

    topn: int | None = None
    """Take the N heaviest cases of each operator, by input and result bytes times call count."""
    sample: int | None = None
    """Draw N cases of all operators by weight, without replacement; reproducible."""
    profile: str | None = None
    """Key of PROFILES; None means ``small`` on a CPU and ``full`` elsewhere."""
    max_mib: float | None = None
    """Size limit of a case that replaces the profile's limit in bytes."""

    def checked(self) -> CaseSelection:
        """Return the choice; raise OpforgeError for a value out of range."""
        for name, value, limits in (
            ("--topn", self.topn, (1, _MAX_CASES)),
            ("--sample", self.sample, (1, _MAX_CASES)),
            ("--max-mib", self.max_mib, (_MIN_CASE_MIB, _MAX_CASE_MIB)),
        ):
            if value is not None:
                check_range(name, value, *limits)
        if self.profile is not None and self.profile not in PROFILES:
            raise OpforgeError(f"unknown profile {self.profile!r}; allowed: {', '.join(PROFILES)}")
        return self

    def profile_for(self, device: str) -> tuple[str, Profile]:
        """Return the profile that applies on a device, with its name."""
        name = self.profile or ("small" if device == "cpu" else "full")
        profile = PROFILES[name]
        if self.max_mib is None:
            return f"profile {name}", profile
        return f"--max-mib {self.max_mib:g}", Profile(
            min(int(self.max_mib * (1 << 20)), _ARENA_BYTES), profile.max_flops
        )

    def select(self, calls: Iterable[TracedCall], device: str) -> tuple[list[TracedCall], Counter[str]]:
        """Return the chosen calls, and the number of calls that are too large, by message."""
        name, profile = self.profile_for(device)
        by_op: dict[str, list[TracedCall]] = defaultdict(list)
        losses: Counter[str] = Counter()
        for call in calls:
            if (
                max(call.input_bytes, call.result_bytes) > profile.max_bytes
                or call.input_bytes + call.result_bytes > _ARENA_BYTES
            ):
                losses[f"{call.op}: more than {profile.max_bytes >> 20} MiB ({name})"] += 1
            elif call.flops > profile.max_flops:
                losses[f"{call.op}: more than {profile.max_flops:.0e} operations ({name})"] += 1
            else:
                by_op[call.op].append(call)
        chosen = [call for op in sorted(by_op) for call in _heaviest(by_op[op], self.topn)]
        return (chosen if self.sample is None else _weighted_sample(chosen, self.sample)), losses


def _heaviest(calls: list[TracedCall], count: int | None) -> list[TracedCall]:
    ordered = sorted(calls, key=lambda c: (-c.weight, c.args))
    return ordered if count is None else ordered[:count]


def _weighted_sample(calls: list[TracedCall], count: int) -> list[TracedCall]:
    """Draw by weight: keep the largest keys log(u) / weight, with u a digest of the call."""

    def key(call: TracedCall) -> float:
        digest = hashlib.blake2b(f"{call.op}|{call.args}".encode(), digest_size=8).digest()
        return math.log((int.from_bytes(digest, "little") + 1) / (1 << 64)) / call.weight

    drawn = {id(call) for call in sorted(calls, key=key, reverse=True)[:count]}
    return [call for call in calls if id(call) in drawn]
