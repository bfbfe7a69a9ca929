"""Judge registered operators on their contract; each failure comes with a fix."""

from opforge.check.report import CHECKS, CheckReport, Finding, OperatorReport, Status
from opforge.check.run import CheckOptions, run_checks
from opforge.check.target import CheckTarget, parse_target

__all__ = [
    "CHECKS",
    "CheckOptions",
    "CheckReport",
    "CheckTarget",
    "Finding",
    "OperatorReport",
    "Status",
    "parse_target",
    "run_checks",
]
