"""The operators, as functions. `opforge add-op` extends this list."""

from .add_scaled_ import add_scaled_
from .rms_norm import rms_norm
from .row_moments import row_moments
from .swiglu import swiglu

__all__ = ["add_scaled_", "rms_norm", "row_moments", "swiglu"]
