"""One operator call as data."""

from opforge.cases.case import Case, Expect, Phase
from opforge.cases.test import Test
from opforge.cases.values import Device, Dtype, Layout, MemoryFormat, TensorSpec, Value

__all__ = ["Case", "Device", "Dtype", "Expect", "Layout", "MemoryFormat", "Phase", "TensorSpec", "Test", "Value"]
