"""The trusted side: reference, contract, numerics and timing.

No kernel's code ever runs in the judge's process.
"""

from opforge.judge.verdict import Verdict, VerdictKind

__all__ = ["Verdict", "VerdictKind"]
