"""Choose among the calls of a trace: what fits, what is heaviest, and a sample by weight."""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from opforge.errors import OpforgeError
from opforge.traces.file import TracedCall

_ROOM = 1 << 30
"""What a worker's memory has for the inputs of a case, and as much again for all that comes back of it."""


@dataclass(frozen=True, slots=True)
class Profile:
    """How large a case may be."""

    bytes: int
    """Of its inputs, and of its results."""
    flops: float


PROFILES = {"small": Profile(32 << 20, 2e9), "full": Profile(256 << 20, math.inf)}
"""``small`` is what two cores of a CPU do in well under a second; ``full`` is several times what the caches of a GPU hold."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a user asks of a suite whose cases have weights."""

    topn: int | None = None
    """The N heaviest cases of each operator: those with the most bytes, in and out, times their count."""
    sample: int | None = None
    """N cases of all operators, drawn without replacement with their weights as chances, the same each time."""
    profile: str | None = None
    """A key of PROFILES; None for ``small`` on a CPU and ``full`` elsewhere."""
    max_mib: float | None = None
    """The largest case, instead of what the profile says."""

    def checked(self) -> Choice:
        """Return the choice, or say what of it is out of its range."""
        for name, value in (("--topn", self.topn), ("--sample", self.sample), ("--max-mib", self.max_mib)):
            if value is not None and not value > 0:
                raise OpforgeError(f"{name} {value} is too small; it must be above 0")
        if self.profile is not None and self.profile not in PROFILES:
            raise OpforgeError(f"unknown profile {self.profile!r}; allowed: {', '.join(PROFILES)}")
        return self

    def limits(self, device: str) -> tuple[str, Profile]:
        """Return the profile that applies on a device, with its name."""
        name = self.profile or ("small" if device == "cpu" else "full")
        profile = PROFILES[name]
        if self.max_mib is None:
            return f"profile {name}", profile
        return f"--max-mib {self.max_mib:g}", Profile(min(int(self.max_mib * (1 << 20)), _ROOM), profile.flops)

    def of(self, calls: Iterable[TracedCall], device: str) -> tuple[list[TracedCall], Counter[str]]:
        """Return the calls that are chosen, and how many are too large, by the words for it."""
        name, profile = self.limits(device)
        by_op: dict[str, list[TracedCall]] = defaultdict(list)
        losses: Counter[str] = Counter()
        for call in calls:
            if max(call.input_bytes, call.result_bytes) > profile.bytes or call.input_bytes + call.result_bytes > _ROOM:
                losses[f"{call.op}: more than {profile.bytes >> 20} MiB ({name})"] += 1
            elif call.flops > profile.flops:
                losses[f"{call.op}: more than {profile.flops:.0e} operations ({name})"] += 1
            else:
                by_op[call.op].append(call)
        chosen = [call for op in sorted(by_op) for call in _heaviest(by_op[op], self.topn)]
        return (chosen if self.sample is None else _sample(chosen, self.sample)), losses


def _heaviest(calls: list[TracedCall], count: int | None) -> list[TracedCall]:
    ordered = sorted(calls, key=lambda c: (-c.weight, c.args))
    return ordered if count is None else ordered[:count]


def _sample(calls: list[TracedCall], count: int) -> list[TracedCall]:
    """Draw by weight: of the keys log(u) / weight, with u a digest of the call, the largest are as such a draw."""

    def key(call: TracedCall) -> float:
        digest = hashlib.blake2b(f"{call.op}|{call.args}".encode(), digest_size=8).digest()
        return math.log((int.from_bytes(digest, "little") + 1) / (1 << 64)) / call.weight

    kept = {id(call) for call in sorted(calls, key=key, reverse=True)[:count]}
    return [call for call in calls if id(call) in kept]
