"""Operators: their names, families, forms and schema facts, read from torchgen's own data."""

from opforge.ops.custom_operator import CustomOperator
from opforge.ops.operator import Argument, Operator, SchemaKind
from opforge.ops.operator_table import OpTable, table

__all__ = ["Argument", "CustomOperator", "OpTable", "Operator", "SchemaKind", "table"]
