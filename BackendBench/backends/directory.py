"""The kernels of a directory."""

from pathlib import Path

from opforge.backends import BackendOptions
from opforge.backends import directory as opforge_directory
from opforge.ops import table

from .base import Backend


class DirectoryBackend(Backend):
    """``{op}/{op}_implementation_1.py``; a folder such as ``add__Tensor`` is for that overload alone."""

    def __init__(self, ops_dir: str | Path = "generated_kernels") -> None:
        self.ops_dir = str(ops_dir)
        backend = opforge_directory.DirectoryBackend(BackendOptions(ops_directory=Path(ops_dir)))
        super().__init__("directory", backend.kernels([op.name for op in table()]))
        self.skipped = backend.skipped
