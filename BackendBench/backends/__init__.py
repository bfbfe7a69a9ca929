"""Backends under their known names: ``op in backend`` and ``backend[op]``."""

from .aten import AtenBackend
from .base import Backend
from .custom_ops import CustomOpsBackend
from .directory import DirectoryBackend
from .flag_gems import FlagGemsBackend
from .llm import KernelAgentBackend, LLMBackend

__all__ = [
    "AtenBackend",
    "Backend",
    "CustomOpsBackend",
    "DirectoryBackend",
    "FlagGemsBackend",
    "KernelAgentBackend",
    "LLMBackend",
]
