"""Proofs: for which calls a kernel is correct, and at which sizes it is not slower.

A proof is stored beside the kernel's file. A signature (the dtypes of a call) of an operator is
proven if some case with it passed and none failed. The ranges of ranks, sizes and extents and the
layouts are those of the passed cases. Nothing is proven about a kernel that cheated, crashed or
hung anywhere. Failures are stored with the proof until the same case passes or the source changes:
a smaller run must not prove what a larger run found to be wrong.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from filelock import FileLock

from opforge import cache
from opforge.cases.text import parse_arguments
from opforge.cases.values import DTYPES, Device, Dtype, TensorSpec
from opforge.cases.variant_shapes import LARGE_VARIANT_NAMES, LAYOUT_VARIANT_NAMES, enlarged_shapes
from opforge.errors import CaseSyntaxError
from opforge.kernels import Kernel
from opforge.kernels.proof import proof_path
from opforge.kernels.source import UNREADABLE, digest, with_resolved_folder
from opforge.ops import table
from opforge.runs.config import DEFAULT_RACE_S
from opforge.runs.manifest import Manifest
from opforge.runs.rows import ResultRow
from opforge.runtime import signing
from opforge.runtime.layouts import SHAPES_DIFFER, layout_names
from opforge.runtime.proof_files import PROOF_FORMAT, read_proof_file, sign_proof
from opforge.runtime.trees import instances
from opforge.runtime.value_ranges import DEFAULT, CollectedValues, add_value, dtype_signature, value_kind

VOIDING_VERDICTS = frozenset({"cheated", "crashed", "timed_out"})
"""Verdicts that void the whole proof."""
_MAX_FAILED_CASES = 64
"""Maximum number of failed cases kept by name, per operator and signature."""
_PATIENCE_S = 60.0
"""Time to wait while another run holds the proof's lock."""
_TIMING_EXTRAPOLATION = 2.0
"""Timings extrapolate by this factor below the smallest and above the largest timed size."""


Ranges = list[list[int]]
"""Minimum and maximum extent of each dimension of a tensor, last dimension first."""
Extents = list[Ranges]
"""Ranges of each tensor argument, or of all tensors of a list argument."""
_FILES = "files outside its folder"
"""The probe's name for the protection without which proofs are worthless."""
_OMITTED = object()
"""Placeholder for an omitted argument."""


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of one case, as a proof describes them."""

    signature: str
    """The dtypes of its tensors, in the runtime's notation."""
    slots: list[list[TensorSpec]]
    """The tensors of each tensor argument."""
    others: dict[str, Any]
    """Non-tensor arguments by name."""

    @property
    def specs(self) -> list[TensorSpec]:
        return [spec for slot in self.slots for spec in slot]


@dataclass
class _PassedCases:
    """The passed cases of one operator and signature."""

    ranks: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    extents: Extents = field(default_factory=list)
    layouts: set[str] = field(default_factory=set)
    timed: list[tuple[int, bool]] = field(default_factory=list)
    """Numbers of elements, with whether the kernel was not slower at that size."""
    arguments: CollectedValues = field(default_factory=dict)
    native: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Numbers of elements in cases judged behind a native slot, by how they ran."""

    def add(self, call: _Call, row: ResultRow, *, counts_times: bool) -> None:
        specs = call.specs
        numel = max((s.numel for s in specs), default=0)
        for name, value in call.others.items():
            word, numbers = (DEFAULT, []) if value is _OMITTED else value_kind(value, _constant_name)
            if word:
                add_value(self.arguments, name, word, numbers)
        variants = set(row.variants)
        self.ranks += [len(s.shape) for s in specs] + ([0] if "zero_dim" in variants else [])
        self.sizes += [numel] + ([0] if "empty" in variants else []) + ([1] if "zero_dim" in variants else [])
        self.sizes += [max(map(math.prod, shapes)) for shapes in _enlarged(call, variants)]
        self.extents = functools.reduce(_union_extents, _judged_extents(call, variants), self.extents)
        self.layouts |= {word for s in specs for word in layout_names(s.shape, s.strides)} | (
            variants & LAYOUT_VARIANT_NAMES
        )
        self.layouts |= {"offset"} if any(s.offset for s in specs) else set()
        self.layouts |= {SHAPES_DIFFER} if len({tuple(s.shape) for s in specs}) > 1 else set()
        if row.ran:
            self.native[row.ran].append(numel)
        if counts_times and row.headline is not None:
            self.timed.append((numel, not_slower(row)))

    def as_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "rank": [min(self.ranks, default=0), max(self.ranks, default=0)],
            "numel": [min(self.sizes), max(self.sizes)],
            "extents": self.extents,
            "layouts": sorted(self.layouts),
        }
        if arguments := {name: words for name, words in self.arguments.items() if words != {DEFAULT: []}}:
            row["arguments"] = arguments
        if self.native:
            ways = sorted(self.native.items())
            row["native"] = {way: {"cases": len(ns), "numel": [min(ns), max(ns)]} for way, ns in ways}
        return {**row, "timed": timed_ranges(self.timed)} if self.timed else row


def _judged_extents(call: _Call, variants: Collection[str]) -> Iterator[Extents]:
    """Yield the extents of each tensor argument: of the case itself, then of its resized variants."""
    case_shapes = [[s.shape for s in slot] for slot in call.slots]
    yield _extents_of(case_shapes)
    if "empty" in variants:
        size = next(shape[0] for slot in case_shapes for shape in slot if shape and 0 not in shape)
        yield _extents_of([[(0, *s[1:]) if s and s[0] == size else s for s in slot] for slot in case_shapes])
    for large_shapes in _enlarged(call, variants):
        shapes = iter(large_shapes)
        yield _extents_of([[next(shapes) for _ in slot] for slot in case_shapes])


def _enlarged(call: _Call, variants: Collection[str]) -> Iterator[list[tuple[int, ...]]]:
    """Yield the shapes of all tensors in the enlarged variants that passed."""
    for variant in LARGE_VARIANT_NAMES:
        if variant in variants and (shapes := enlarged_shapes(variant, [s.shape for s in call.specs])) is not None:
            yield shapes


def _extents_of(slots: Iterable[Iterable[Sequence[int]]]) -> Extents:
    return [functools.reduce(_union_ranges, ([[n, n] for n in reversed(s)] for s in slot), []) for slot in slots]


def _union_extents(before: Extents, now: Extents) -> Extents:
    """Return the union of two proven ranges."""
    none: Ranges = []
    return [_union_ranges(left, right) for left, right in zip_longest(before, now, fillvalue=none)]


def _union_ranges(left: Ranges, right: Ranges) -> Ranges:
    none: list[int] = []
    both = [[*a, *b] for a, b in zip_longest(left, right, fillvalue=none)]
    return [[min(ends), max(ends)] for ends in both]


def not_slower(row: ResultRow) -> bool:
    """Whether a kernel is not measurably slower than ATen.

    Checks the headline time and, on a GPU, also the call time of a caller in a row of calls.
    """
    return all(times.high >= 1.0 for times in (row.headline, row.times("call")) if times is not None)


def timed_ranges(timed: Iterable[tuple[int, bool]]) -> list[list[Any]]:
    """Return size ranges with whether a kernel is not slower there.

    Each timed size covers the sizes nearer to it than to the next timed size.
    """
    worst: dict[int, bool] = {}
    for numel, good in timed:
        worst[numel] = worst.get(numel, True) and good
    sizes = sorted(worst)
    merged: list[list[Any]] = []
    for i, numel in enumerate(sizes):
        low = math.floor(numel / _TIMING_EXTRAPOLATION) if i == 0 else merged[-1][1] + 1
        high = (
            math.floor(numel * _TIMING_EXTRAPOLATION)
            if i == len(sizes) - 1
            else math.floor(math.sqrt(numel * sizes[i + 1]))
        )
        if merged and merged[-1][2] == worst[numel]:
            merged[-1][1] = max(high, merged[-1][1])
        else:
            merged.append([low, max(high, low), worst[numel]])
    return merged


@dataclass
class _KernelVerdicts:
    """The verdicts of a run on one kernel, by operator and signature."""

    kernel: Kernel
    passed: dict[str, dict[str, _PassedCases]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(_PassedCases))
    )
    failed: dict[str, dict[str, dict[str, str]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(dict)))
    """Verdicts by case id."""
    passed_ids: set[tuple[str, str]] = field(default_factory=set)
    """Operators and ids of passed cases, including those on which ATen raises."""

    def add(self, row: ResultRow, *, raises: bool, counts_times: bool) -> None:
        if row.verdict == "unsupported":
            return
        call = _call(row) or _Call("", [], {})
        if row.verdict != "passed":
            self.failed[row.op][call.signature][row.id] = row.verdict
            return
        self.passed_ids.add((row.op, row.id))
        if not raises and call.specs:  # without a tensor there is no dtype or size to prove
            self.passed[row.op][call.signature].add(call, row, counts_times=counts_times)


@dataclass(frozen=True, slots=True)
class WrittenProofs:
    """The proofs written by a run."""

    paths: list[Path]
    remarks: dict[str, str]
    """Why a kernel's proof was not written, by kernel."""


def write_proofs(
    kernels: Iterable[Kernel],
    rows: Iterable[ResultRow],
    manifest: Manifest,
    raising_case_ids: Collection[str],
    *,
    finished: bool = True,
) -> WrittenProofs:
    """Write a proof beside each judged kernel, or remove one that no longer holds.

    A proof that cannot be written is reported and does not stop the others. ``raising_case_ids``
    are those of cases in which ATen raises: they prove nothing about the calls that ATen answers, but
    their failures count. A proof of the same source, device and torch from an earlier run is
    widened. After an interrupted run (not ``finished``) only failures are kept, and nothing is
    widened. Speeds are kept if races were not shorter than usual: few rounds make wide intervals, and a
    kernel that is slower may look as fast.
    """
    judged = {k.name: _KernelVerdicts(k) for k in kernels if k.file is not None and k.reference is None}
    counts_times = float(manifest.config.get("race_s", DEFAULT_RACE_S)) >= DEFAULT_RACE_S
    for row in rows:
        if row.kernel in judged and (finished or row.verdict != "passed"):
            judged[row.kernel].add(row, raises=row.id in raising_case_ids, counts_times=counts_times)
    written = WrittenProofs([], {})
    if _FILES in manifest.missing_protections:
        reason = f"no proof is written: kernels could read the key that signs proofs (missing protection: {_FILES})"
        for verdicts in judged.values():
            with contextlib.suppress(OSError):
                if verdicts.failed:  # the existing proof no longer holds
                    proof_path(Path(verdicts.kernel.file or "")).unlink(missing_ok=True)
        return WrittenProofs([], {name: reason for name, verdicts in judged.items() if verdicts.passed})
    for name, verdicts in sorted(judged.items(), key=lambda item: not item[1].failed):  # void proofs first
        if not finished and not verdicts.failed:
            continue
        file = Path(verdicts.kernel.file or "")
        if verdicts.kernel.is_file_digest and digest(file) != verdicts.kernel.digest:
            written.remarks[name] = (
                f"{file} was changed while it was judged, so no proof is written; judge it again with `opforge run`"
            )
            continue
        path = proof_path(file)
        try:
            if _write(path, verdicts, manifest, finished=finished):
                written.paths.append(path)
        except OSError as error:
            written.remarks[name] = f"{path} cannot be written: {error.strerror or error}" + _left(path, verdicts)
    return written


def _write(path: Path, judged: _KernelVerdicts, manifest: Manifest, *, finished: bool) -> bool:
    """Write or remove a kernel's proof; return whether it was written.

    The file is locked, as another run may write it too.
    """
    lock = cache.root() / "locks" / f"{hashlib.sha256(os.fsencode(with_resolved_folder(path))).hexdigest()[:16]}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock, timeout=_PATIENCE_S):
        proof = _proof(judged, manifest, read_proof_file(path), finished=finished)
        if judged.kernel.digest != UNREADABLE and (proof["operators"] or proof.get("failed")):
            cache.write_atomically(path, json.dumps(sign_proof(signing.load_or_create_key(), proof), indent=1) + "\n")
            return True
        path.unlink(missing_ok=True)
        return False


def _left(path: Path, judged: _KernelVerdicts) -> str:
    """Remove a proof that cannot record its failures; if that fails too, say so."""
    if not judged.failed:
        return ""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
    return "; its old contents are no longer valid: delete it" if path.is_file() else ""


def _proof(judged: _KernelVerdicts, manifest: Manifest, before: Any, *, finished: bool) -> dict[str, Any]:
    head = {
        "opforge_proof": PROOF_FORMAT,
        "kernel": judged.kernel.name,
        "digest": judged.kernel.digest,
        "torch": manifest.versions["torch"],
        "device": manifest.machine.name,
    }
    if not isinstance(before, dict) or any(before[key] != head[key] for key in ("digest", "device", "torch")):
        before = {"suites": [], "operators": {}, "failed": {}}
    suites = {*before["suites"], manifest.suite}
    operators = {op: dict(by_signature) for op, by_signature in before["operators"].items()}
    for op, groups in judged.passed.items() if finished else ():
        for signature, group in groups.items():
            op_rows = operators.setdefault(op, {})
            op_rows[signature] = _union_rows(op_rows.get(signature), group.as_json())
    failed = _failed(before["failed"], judged, finished=finished)
    void = any(
        VOIDING_VERDICTS & {*row["cases"].values(), *row["more"]}
        for by_signature in failed.values()
        for row in by_signature.values()
    )
    proven = {
        op: rows
        for op, by_signature in operators.items()
        if not void and (rows := {key: row for key, row in by_signature.items() if key not in failed.get(op, {})})
    }
    return {**head, "suites": sorted(suites), "operators": proven, **({"failed": failed} if failed else {})}


def _failed(before: Mapping[str, Any], judged: _KernelVerdicts, *, finished: bool) -> dict[str, dict[str, Any]]:
    """Return known failures: new ones, and earlier ones unless the same case has passed since."""
    failed: dict[str, dict[str, Any]] = {}
    for op in sorted({*before, *judged.failed}):
        old, new = before.get(op, {}), judged.failed.get(op, {})
        for signature in sorted({*old, *new}):
            row = old.get(signature, {"cases": {}, "more": {}})
            still_failed = {
                case: verdict
                for case, verdict in row["cases"].items()
                if not finished or (op, case) not in judged.passed_ids or case in new.get(signature, {})
            }
            if entry := _bounded({**still_failed, **new.get(signature, {})}, row["more"]):
                failed.setdefault(op, {})[signature] = entry
    return failed


def _bounded(cases: Mapping[str, str], before: Mapping[str, int]) -> dict[str, Any] | None:
    """Return the failed cases, gravest first, and the counts beyond the limit; None if none.

    Errors beyond the limit are not counted. Most come from a kernel that cannot be loaded, which
    says nothing about its source, and no call is answered by an error.
    """
    order = sorted(cases, key=lambda case: (cases[case] not in VOIDING_VERDICTS, cases[case] == "error"))
    excess = Counter(cases[case] for case in order[_MAX_FAILED_CASES:] if cases[case] != "error")
    more = {verdict: max(excess[verdict], before.get(verdict, 0)) for verdict in sorted({*excess, *before})}
    return {"cases": {case: cases[case] for case in order[:_MAX_FAILED_CASES]}, "more": more} if cases or more else None


def _union_rows(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """Return what two runs prove together; timings and ways come from the later run that has any."""
    if before is None:
        return now
    union: dict[str, Any] = {
        name: [min(before[name][0], now[name][0]), max(before[name][1], now[name][1])] for name in ("rank", "numel")
    }
    union["extents"] = _union_extents(before["extents"], now["extents"])
    union["layouts"] = sorted({*before["layouts"], *now["layouts"]})
    arguments: CollectedValues = {}
    for one, other in ((before, now), (now, before)):
        for name, words in one.get("arguments", {}).items():
            for word, numbers in {**words, **({} if name in other.get("arguments", {}) else {DEFAULT: []})}.items():
                add_value(arguments, name, word, numbers)
    union |= {"arguments": arguments} if arguments else {}
    native = now.get("native") or before.get("native")
    union |= {"native": native} if native else {}
    timed = now.get("timed") or before.get("timed")
    return {**union, "timed": timed} if timed else union


def _call(row: ResultRow) -> _Call | None:
    """Return the arguments of a case as a proof describes them; None for operators outside ATen."""
    op = table().get(row.op)
    if op is None:
        return None
    try:
        args, kwargs = parse_arguments(row.case)
    except CaseSyntaxError:
        return None  # its verdict reports it
    bound = op.bind(args, kwargs)
    values = [bound.get(a.name) for a in op.arguments if "Tensor" in a.type]
    others = {
        a.name: _as_delivered(bound.get(a.name, _OMITTED), a.type) for a in op.arguments if "Tensor" not in a.type
    }
    signature = dtype_signature(values, lambda short: DTYPES[short][0])
    return _Call(signature, [list(instances(value, TensorSpec)) for value in values], others)


def _as_delivered(value: Any, type_: str) -> Any:
    """Return a case's value as the kernel receives it.

    Following the schema, torch expands a number to a list and converts 1 to 1.0.
    """
    if isinstance(value, list | tuple):
        return [_as_delivered(element, type_.partition("[")[0]) for element in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if type_.startswith("float"):
        with contextlib.suppress(OverflowError):  # torch refuses such a call
            value = float(value)
    size = re.search(r"\[(\d+)\]", type_)
    return [value] * int(size[1]) if size else value


def _constant_name(value: Any) -> str:
    """Return the name of a value that stands for a torch constant, in the runtime's notation."""
    if isinstance(value, Device):
        return ""
    if isinstance(value, TensorSpec):
        return "tensor"  # where the schema has no tensor: matches no call
    return DTYPES[value.short][0] if isinstance(value, Dtype) else str(value.name)
