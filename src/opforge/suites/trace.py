"""A file of recorded calls as a suite: a trace, or PyTorch's operator-input log."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from opforge import cache
from opforge.cases import Case, Expect, Phase
from opforge.cases.case import case_id
from opforge.cases.text import format_arguments, parse_arguments
from opforge.cases.values import Arguments, Device, TensorSpec
from opforge.ops import table
from opforge.runtime.trees import map_instances
from opforge.suites.base import LoadedSuite, Progress, SuiteOptions, no_progress
from opforge.traces.call_cost import with_small_offset
from opforge.traces.contents import map_specs
from opforge.traces.formats import check_format, read_calls, write_blob
from opforge.traces.trace_file import TracedCall

_BLOB_OFFSET = re.compile(r", at=\d+")
_OFFSET_OR_DEVICE = re.compile(r", (?:offset=\d+|device='[^']*')|device\('[^']*'\)")


class TraceSuite:
    """The calls of a file, each as a case for correctness and one for performance."""

    weighted = True
    """Whether cases can be chosen by weight."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        check_format(path)
        self._path = path
        self.name = name or path.stem

    def load(self, options: SuiteOptions, progress: Progress = no_progress) -> LoadedSuite:
        progress(self.name, 0, 1)
        trace = read_calls(self._path, options.ops, all_columns=False)
        usable, losses = _usable(trace.calls, options.device)
        home = trace.metadata["device"]
        chosen, too_large = options.selection.select(_distinct(usable, home, options.device), options.device)
        cases: dict[str, list[Case]] = {}
        for call in chosen:
            cases.setdefault(call.op, []).extend(self._cases(call, home, options.device))
        losses = Counter(trace.losses) + losses + too_large
        progress(self.name, 1, 1)
        return LoadedSuite(
            self.name,
            cases,
            self._blobs(chosen),
            tuple(f"{message} ({count}×)" for message, count in losses.most_common()),
            {str(self._path.resolve()): _digest(self._path)},
        )

    def _cases(self, call: TracedCall, home: str, device: str) -> Iterator[Case]:
        args = _placed(call.args, home, device)
        blob = self.name if "at=" in args else ""
        text_for_id = _BLOB_OFFSET.sub("", args) if blob else args  # ids do not depend on blob offsets
        for phase in Phase:
            id_ = case_id(call.op, text_for_id, call.digest, Expect.RETURNS, phase)
            yield Case(call.op, args, phase=phase, source=call.source, id=id_, blob=blob)

    def _blobs(self, chosen: Iterable[TracedCall]) -> dict[str, Path]:
        """Return the blob, unpacked into the cache; empty if no case has stored contents."""
        if not any(call.digest for call in chosen):
            return {}
        blob = cache.root() / "traces" / f"{_digest(self._path)}.safetensors"
        if not blob.exists():
            write_blob(self._path, blob)
        return {self.name: blob}


def _usable(calls: Iterable[TracedCall], device: str) -> tuple[list[TracedCall], Counter[str]]:
    """Return the calls that ATen supports on a device, and counts of the others by reason."""
    kind = device.partition(":")[0]
    usable: list[TracedCall] = []
    losses: Counter[str] = Counter()
    for call in calls:
        facts = table().get(call.op)
        if "::" in call.op:
            losses[f"{call.op}: not an operator of ATen, so there is nothing to compare a kernel with"] += 1
        elif facts is None:
            losses[f"{call.op}: no such operator in torch {cache.torch_version()}"] += 1
        elif kind not in facts.devices:
            losses[f"{call.op}: ATen has no kernel for it on {kind}"] += 1
        else:
            usable.append(call)
    return usable, losses


def _distinct(calls: Iterable[TracedCall], home: str, device: str) -> list[TracedCall]:
    """Merge calls that differ on a device at most in storage offsets, and add up their counts."""
    groups: dict[tuple[str, str, str], list[TracedCall]] = {}
    for call in calls:
        groups.setdefault((call.op, _OFFSET_OR_DEVICE.sub("", call.args), call.digest), []).append(call)
    return [
        call for group in groups.values() for call in (_merge_equal(group, home, device) if len(group) > 1 else group)
    ]


def _merge_equal(calls: Iterable[TracedCall], home: str, device: str) -> Iterable[TracedCall]:
    merged: dict[str, TracedCall] = {}
    for call in calls:
        args = _placed(call.args, home, device)
        earlier = merged.get(args)
        merged[args] = call if earlier is None else replace(earlier, count=earlier.count + call.count)
    return merged.values()


def _placed(args: str, home: str, device: str) -> str:
    """Move arguments to the device of a run; reduce storage offsets, keeping the alignment."""
    if "device" not in args and "offset=" not in args:
        return args
    data = map_specs(parse_arguments(args), lambda spec: _here(spec, home))
    return format_arguments(*_on_device(data, home, device))


def _here(spec: TensorSpec, home: str) -> TensorSpec:
    elsewhere = spec.device is not None and spec.device.partition(":")[0] != home
    return replace(with_small_offset(spec), device=spec.device if elsewhere else None)


def _on_device(data: Arguments, home: str, device: str) -> Arguments:
    def moved(value: Device) -> Device:
        return Device(device) if value.name.partition(":")[0] == home else value

    placed: Arguments = map_instances(data, Device, moved)
    return placed


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
