"""The request of a client: a kernel, the operator it is for, its cases, and a reward formula."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from opforge.cases import Case, Phase
from opforge.cases.case import Expect
from opforge.cases.text import format_arguments, parse_arguments
from opforge.cases.values import TensorSpec
from opforge.errors import CaseSyntaxError, NothingToJudgeError, OpforgeError, UnknownNameError
from opforge.runs.plan import OperatorCases
from opforge.runtime.trees import instances
from opforge.serve.reward import REWARDS
from opforge.suites import LoadedSuite

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
        given = [_given_case(primary, text, Phase.CORRECTNESS) for text in (*request.cases, *request.timed_cases)]
        given += [_given_case(primary, text, Phase.PERFORMANCE) for text in request.timed_cases if request.timed]
        given += [_given_case(primary, text, Phase.CORRECTNESS, Expect.RAISES) for text in request.refused_cases]
        return [OperatorCases(primary, True, list({(case.id, case.phase): case for case in given}.values()))]
    parts = []
    for op, required in serves.items():
        cases = [case for case in suite.cases.get(op, ()) if request.timed or case.phase is Phase.CORRECTNESS]
        if cases:
            parts.append(OperatorCases(op, required, cases))
    if not parts:
        raise NothingToJudgeError(f"suite {suite.name!r} of this server has no case for {primary}; send cases")
    return parts


def _given_case(op: str, text: str, phase: Phase, expect: Expect = Expect.RETURNS) -> Case:
    args, kwargs = parse_arguments(text)
    if any(spec.at is not None for spec in instances((args, kwargs), TensorSpec)):
        raise CaseSyntaxError(
            f"{text!r} refers with at= to a suite's stored contents, which are not here; remove at=, "
            "and give the range of values with low= and high="
        )
    return Case.make(op, format_arguments(args, kwargs), phase=phase, expect=expect, source="given")
