"""Whether runs are comparable: the same cases on the same device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opforge.errors import RunDirectoryError
from opforge.runs.config import DEFAULT_RACE_S
from opforge.runs.manifest import Manifest
from opforge.runs.store import read_manifest


class IncomparableError(RunDirectoryError):
    """Two runs that are not comparable."""


def finished_manifest(path: Path) -> Manifest:
    """Return the manifest of a finished run."""
    manifest = read_manifest(path)
    if manifest.finished is None:
        raise RunDirectoryError(
            f"the run in {str(path)!r} is unfinished and cannot be compared; finish it with `opforge run --resume "
            f"{path}`"
        )
    return manifest


def device_name(manifest: Manifest) -> str:
    """Return the device of a run: its kind and its vendor name."""
    kind, name = manifest.device.partition(":")[0], manifest.machine.name
    return f"{kind} ({name})" if name else kind


def describe_suite(manifest: Manifest) -> str:
    """Describe the cases of a run."""
    plan = manifest.plan
    digest = "unknown (of an older opforge)" if plan.suite_digest is None else plan.suite_digest
    return f"{manifest.suite_name}, {plan.operators} operators, digest {digest}"


def comparison_key(manifest: Manifest) -> tuple[str, str]:
    """Return the keys that comparable runs share: the suite's digest and the device."""
    return manifest.plan.suite_digest or "", device_name(manifest)


def incompatibilities(before: Manifest, after: Manifest) -> Iterator[str]:
    """Yield the reasons why two runs cannot be compared."""
    digests = comparison_key(before)[0], comparison_key(after)[0]
    if digests[0] != digests[1] or not digests[0]:
        yield f"the cases differ: {describe_suite(before)}; and {describe_suite(after)}"
        for name in ("ops", "dtypes", "topn", "sample", "profile", "max_mib"):
            mine, theirs = before.config.get(name), after.config.get(name)
            if mine != theirs:
                yield f"--{name.replace('_', '-')} was {_setting_text(mine)}, and {_setting_text(theirs)}"
    if comparison_key(before)[1] != comparison_key(after)[1]:
        yield f"the devices differ: {comparison_key(before)[1]}, and {comparison_key(after)[1]}"


def other_differences(before: Manifest, after: Manifest) -> Iterator[str]:
    """Yield other differences between comparable runs that may explain a change."""
    for name in ("torch", "triton", "python", "opforge"):
        mine, theirs = before.versions.get(name), after.versions.get(name)
        if mine != theirs:
            yield f"{name} differs: {mine}, and {theirs}" + ("; ATen differs, too" if name == "torch" else "")
    for file, digest in before.plan.sources.items():
        if after.plan.sources.get(file, digest) != digest:
            yield f"{file} has changed"
    for name in ("timeout_s", "race_s", "memory_gib", "allow_fallback", "confine", "runtime"):
        older = {"runtime": "python", "race_s": DEFAULT_RACE_S}.get(name)  # what runs without this setting had
        mine, theirs = before.config.get(name, older), after.config.get(name, older)
        if mine != theirs:
            yield f"setting {name} was {_setting_text(mine)}, and {_setting_text(theirs)}"


def _setting_text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "not given"
    return "not given" if value is None else str(value)
