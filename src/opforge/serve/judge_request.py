"""The request of a client: a kernel, the operator it is for, its cases, and a reward formula."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from opforge.cases import Phase
from opforge.cases.case import Expect
from opforge.errors import NothingToJudgeError, OpforgeError, UnknownNameError
from opforge.runs.plan import OperatorCases
from opforge.serve.reward import REWARDS
from opforge.suites import LoadedSuite
from opforge.suites.given import given_case, performance_case

SUFFIXES = {"python": ".py", "cpp": ".cpp", "cuda": ".cu"}
"""Languages of kernels, Triton being Python, and the suffixes of their files."""
MAX_CASES = 1000


@dataclass(frozen=True, slots=True)
class JudgeRequest:
    """A kernel to judge. Without cases of its own, the server's suite has the cases."""

    op: str
    """Operator as in ``opforge run --ops``: ``relu``, or one overload such as ``add.Tensor``."""
    source: str
    """Text of the kernel's file."""
    language: str = "python"
    cases: tuple[str, ...] = ()
    """Calls such as ``((T([64, 33], f32),), {})``."""
    timed_cases: tuple[str, ...] = ()
    """Calls that are timed too."""
    refused_cases: tuple[str, ...] = ()
    """Calls on which ATen raises, so the kernel must."""
    timed: bool = True
    """Whether a right kernel is timed."""
    reward: str = "correct"

    def checked(self) -> JudgeRequest:
        """Return the request; raises if it cannot be judged."""
        if self.language not in SUFFIXES:
            raise UnknownNameError("language", self.language, SUFFIXES)
        if self.reward not in REWARDS:
            raise UnknownNameError("reward", self.reward, REWARDS)
        if not self.source.strip():
            raise OpforgeError("source is empty; send the text of the kernel's file")
        if (count := len(self.cases) + len(self.timed_cases) + len(self.refused_cases)) > MAX_CASES:
            raise OpforgeError(f"{count} cases are too many for a request; {MAX_CASES} are allowed")
        return self

    def wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, fields: dict[str, Any]) -> JudgeRequest:
        values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in fields.items()}
        return cls(**values)

    def digest(self, server: str) -> str:
        """Return a digest of all that decides the answer; ``server`` stands for the server's settings."""
        text = json.dumps([server, self.wire()], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def cases_of(request: JudgeRequest, serves: dict[str, bool], primary: str, suite: LoadedSuite) -> list[OperatorCases]:
    """Return the cases of a kernel that serves these operators; the values say which it must serve."""
    if request.cases or request.timed_cases or request.refused_cases:
        given = [given_case(primary, text) for text in (*request.cases, *request.timed_cases)]
        given += [performance_case(primary, text) for text in request.timed_cases if request.timed]
        given += [given_case(primary, text, expect=Expect.RAISES) for text in request.refused_cases]
        return [OperatorCases(primary, True, list({(case.id, case.phase): case for case in given}.values()))]
    parts = []
    for op, required in serves.items():
        cases = [case for case in suite.cases.get(op, ()) if request.timed or case.phase is Phase.CORRECTNESS]
        if cases:
            parts.append(OperatorCases(op, required, cases))
    if not parts:
        raise NothingToJudgeError(f"suite {suite.name!r} of this server has no case for {primary}; send cases")
    return parts
