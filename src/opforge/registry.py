"""Registry of what other packages may add: suites, backends, providers, executors, and so on."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from opforge.errors import OpforgeError, UnknownNameError

BUILTIN: dict[str, dict[str, str]] = {
    "suites": {
        "smoke": "opforge.suites.smoke:SmokeSuite",
        "opinfo": "opforge.suites.opinfo.suite:OpInfoSuite",
        "torchbench": "opforge.suites.torchbench:TorchbenchSuite",
        "custom_ops": "opforge.suites.custom_ops:CustomOpsSuite",
    },
    "backends": {
        "aten": "opforge.backends.aten:AtenBackend",
        "directory": "opforge.backends.directory:DirectoryBackend",
        "custom_ops": "opforge.backends.custom_ops:CustomOpsBackend",
        "flag_gems": "opforge.backends.flag_gems:FlagGemsBackend",
        "llm": "opforge.generate.backend:LlmBackend",
        "llm-relay": "opforge.generate.backend:RelayBackend",
        "kernel_agent": "opforge.generate.backend:KernelAgentBackend",
    },
    "providers": {
        "anthropic": "opforge.generate.hosted:AnthropicProvider",
        "openai": "opforge.generate.hosted:OpenAIProvider",
        "relay": "opforge.generate.hosted:RelayProvider",
        "transcript": "opforge.generate.transcript:TranscriptProvider",
    },
    "executors": {
        "local": "opforge.runs.execute.local:ThisMachine",
        "ray": "opforge.runs.execute.ray.executor:RayCluster",
    },
}
"""Built-in entries, so that a checkout works uninstalled; pyproject.toml repeats them."""


@cache
def _entries(kind: str) -> dict[str, EntryPoint]:
    group = f"opforge.{kind}"
    found = {name: EntryPoint(name, value, group) for name, value in BUILTIN.get(kind, {}).items()}
    for entry in entry_points(group=group):
        found.setdefault(entry.name, entry)
    return found


def names(kind: str) -> list[str]:
    """Return the registered names of a kind, such as ``suites``."""
    return sorted(_entries(kind))


def load(kind: str, name: str) -> Any:
    """Return the class registered under a name; an unknown name raises with the closest matches."""
    entries = _entries(kind)
    if name not in entries:
        raise UnknownNameError(kind.removesuffix("s"), name, entries)
    entry = entries[name]
    try:
        return entry.load()
    except ImportError as error:
        raise OpforgeError(f"{kind.removesuffix('s')} {name!r} ({entry.value}) cannot be imported: {error}") from error
