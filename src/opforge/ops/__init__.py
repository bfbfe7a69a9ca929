"""Operators: their names, families, forms and schema facts, read from torchgen's own data."""

from opforge.ops.custom import CustomOperator
from opforge.ops.operator import Argument, Form, Operator
from opforge.ops.table import OpTable, table

__all__ = ["Argument", "CustomOperator", "Form", "OpTable", "Operator", "table"]
