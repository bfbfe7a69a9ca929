"""Judge registered operators on their contract; each failure comes with a fix."""

from opforge.authoring.checking.conduct import Options, check
from opforge.authoring.checking.report import CHECKS, Finding, Operator, Report, Status
from opforge.authoring.checking.targets import Target, parse

__all__ = ["CHECKS", "Finding", "Operator", "Options", "Report", "Status", "Target", "check", "parse"]
