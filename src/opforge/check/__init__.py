"""Judge registered operators on their contract; each failure comes with a fix."""

from opforge.check.check_request import CheckOptions, CheckTarget, parse_target
from opforge.check.findings import CHECKS, CheckReport, Finding, OperatorReport, Status
from opforge.check.run import run_checks

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
