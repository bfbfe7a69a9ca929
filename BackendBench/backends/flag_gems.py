"""The installed FlagGems package."""

from opforge.backends import BackendOptions
from opforge.backends import flag_gems as opforge_flag_gems
from opforge.ops import table

from .base import Backend


class FlagGemsBackend(Backend):
    """The operators that FlagGems registers; needs the package, and a GPU to call them."""

    def __init__(self) -> None:
        backend = opforge_flag_gems.FlagGemsBackend(BackendOptions())
        super().__init__("flaggems", backend.kernels([op.name for op in table()]))
        self.ops = self.compiled_kernels
