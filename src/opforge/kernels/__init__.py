"""An implementation of an operator as data. Its code is loaded only in the sandbox."""

from opforge.kernels.kernel import Kernel, Reference, ServedOperator

__all__ = ["Kernel", "Reference", "ServedOperator"]
