"""An implementation of an operator as data. Its code is loaded only in the sandbox."""

from opforge.kernels.kernel import Kernel, Reference, Served

__all__ = ["Kernel", "Reference", "Served"]
