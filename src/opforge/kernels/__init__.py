"""One implementation of an operator as data. Loading it happens in the sandbox only."""

from opforge.kernels.kernel import Kernel, Reference, Served

__all__ = ["Kernel", "Reference", "Served"]
