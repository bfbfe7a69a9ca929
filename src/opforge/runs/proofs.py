"""What a run has proven of each kernel, kept beside its file: for which calls it is right, and at which sizes it is not slower.

An operator is proven for the dtypes of a call where some case with them passed and none failed; the range of ranks and sizes and the layouts are those of
the cases that passed. A kernel that cheated, crashed or hung anywhere has no proof at all.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opforge.cache import write_atomically
from opforge.cases.text import parse_arguments
from opforge.cases.values import DTYPES, TensorSpec
from opforge.errors import CaseSyntaxError
from opforge.kernels import Kernel
from opforge.kernels.proofs import proof_of
from opforge.ops import table
from opforge.runtime.layouts import layout, number_word
from opforge.runtime.proofs import FORMAT, read

NEVER = frozenset({"cheated", "crashed", "timed_out"})
"""Verdicts after which nothing is proven."""
_LAYOUTS = frozenset({"transposed", "strided", "offset", "channels_last", "expanded", "empty"})
"""Forms of a case that are layouts, by the names that the runtime has for them."""
_REACH = 2.0
"""By which factor the smallest and the largest timed size speak for sizes beyond them."""


@dataclass
class _Group:
    """The cases of one operator with the same dtypes."""

    failed: bool = False
    ranks: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    layouts: set[str] = field(default_factory=set)
    timed: list[tuple[int, bool]] = field(default_factory=list)
    """Numbers of elements, with whether the kernel was not slower there."""

    def add(self, specs: list[TensorSpec], row: Mapping[str, Any]) -> None:
        verdict = row["verdict"]
        if verdict == "unsupported":
            return
        self.failed |= verdict != "passed"
        numel = max((s.numel for s in specs), default=0)
        forms = set(row.get("forms", ()))
        self.ranks += [len(s.shape) for s in specs] + ([0] if "zero_dim" in forms else [])
        self.sizes += [numel] + ([0] if "empty" in forms else []) + ([1] if "zero_dim" in forms else [])
        self.layouts |= {layout(s.shape, s.strides) for s in specs} | (forms & _LAYOUTS)
        self.layouts |= {"offset"} if any(s.offset for s in specs) else set()
        if "speedup_high" in row:
            self.timed.append((numel, not_slower(row)))

    def as_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "rank": [min(self.ranks, default=0), max(self.ranks, default=0)],
            "numel": [min(self.sizes), max(self.sizes)],
            "layouts": sorted(self.layouts),
        }
        return {**row, "timed": ranges(self.timed)} if self.timed else row


def not_slower(row: Mapping[str, Any]) -> bool:
    """Whether a kernel may not be called slower than ATen: neither what the device does nor, on a GPU, what a caller waits for in a row of calls."""
    call = row.get("call") or {"high": row["speedup_high"]}
    return bool(row["speedup_high"] >= 1.0 and call["high"] >= 1.0)


def ranges(timed: Iterable[tuple[int, bool]]) -> list[list[Any]]:
    """Return ranges of sizes with whether a kernel is not slower there; a size speaks for those that are nearer to it than to the next."""
    worst: dict[int, bool] = {}
    for numel, good in timed:
        worst[numel] = worst.get(numel, True) and good
    sizes = sorted(worst)
    found: list[list[Any]] = []
    for i, numel in enumerate(sizes):
        low = math.floor(numel / _REACH) if i == 0 else found[-1][1] + 1
        high = math.floor(numel * _REACH) if i == len(sizes) - 1 else math.floor(math.sqrt(numel * sizes[i + 1]))
        if found and found[-1][2] == worst[numel]:
            found[-1][1] = max(high, found[-1][1])
        else:
            found.append([low, max(high, low), worst[numel]])
    return found


def write_proofs(
    kernels: Iterable[Kernel], rows: Iterable[Mapping[str, Any]], manifest: Mapping[str, Any], raising: Collection[str]
) -> list[Path]:
    """Write a proof beside each kernel that was judged, or take away one that no longer holds; return what was written.

    ``raising`` are the ids of cases in which ATen raises: they say nothing of the calls that it answers, unless they fail.
    A proof of the same source, device and torch by an earlier run is kept where this run did not ask about the same operator and dtypes.
    """
    by_name = {k.name: k for k in kernels if k.file is not None and k.reference is None}
    groups: dict[str, dict[str, dict[str, _Group]]] = {n: defaultdict(lambda: defaultdict(_Group)) for n in by_name}
    void: set[str] = set()
    for row in rows:
        if row["kernel"] not in by_name:
            continue
        if row["verdict"] in NEVER:
            void.add(row["kernel"])
        found = None if row["id"] in raising and row["verdict"] == "passed" else _call(row)
        if found is not None:
            signature, specs = found
            groups[row["kernel"]][row["op"]][signature].add(specs, row)
    written = []
    for name, kernel in by_name.items():
        path = proof_of(Path(kernel.file or ""))
        proof = _proof(kernel, {} if name in void else groups[name], manifest, None if name in void else read(path))
        if proof["operators"]:
            write_atomically(path, json.dumps(proof, indent=1) + "\n")
            written.append(path)
        else:
            path.unlink(missing_ok=True)
    return written


def _proof(
    kernel: Kernel, groups: Mapping[str, Mapping[str, _Group]], manifest: Mapping[str, Any], before: Any
) -> dict[str, Any]:
    head = {
        "opforge_proof": FORMAT,
        "kernel": kernel.name,
        "digest": kernel.digest,
        "torch": manifest["versions"]["torch"],
        "device": manifest["machine"]["name"],
    }
    operators: dict[str, dict[str, Any]] = {}
    suites = {manifest["config"]["suite"]}
    if isinstance(before, dict) and all(before.get(key) == head[key] for key in ("digest", "device", "torch")):
        operators = {op: dict(found) for op, found in before["operators"].items()}
        suites |= set(before["suites"])
    for op, found in groups.items():
        kept = operators.setdefault(op, {})
        for signature, group in found.items():
            if group.failed or not group.sizes:
                kept.pop(signature, None)
            else:
                kept[signature] = _wider(kept.get(signature), group.as_json())
    return {**head, "suites": sorted(suites), "operators": {op: found for op, found in operators.items() if found}}


def _wider(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """Return what two runs have proven together; times are those of the later run that has any."""
    if before is None:
        return now
    wider: dict[str, Any] = {
        name: [min(before[name][0], now[name][0]), max(before[name][1], now[name][1])] for name in ("rank", "numel")
    }
    wider["layouts"] = sorted({*before["layouts"], *now["layouts"]})
    timed = now.get("timed") or before.get("timed")
    return {**wider, "timed": timed} if timed else wider


def _call(row: Mapping[str, Any]) -> tuple[str, list[TensorSpec]] | None:
    """Return the dtypes of a case's tensors, as the runtime writes them, and the tensors; None for an operator that is not ATen's."""
    op = table().get(row["op"])
    if op is None:
        return None
    try:
        args, kwargs = parse_arguments(row["case"])
    except CaseSyntaxError:
        return None  # its verdict says so
    given = op.bind(args, kwargs)
    values = [given.get(a.name) for a in op.arguments if "Tensor" in a.type]
    return ",".join(map(_word, values)), list(_specs(values))


def _word(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return "[" + " ".join(dict.fromkeys(map(_word, value))) + "]"
    return DTYPES[value.dtype][0] if isinstance(value, TensorSpec) else number_word(value)


def _specs(values: Iterable[Any]) -> Iterator[TensorSpec]:
    for value in values:
        if isinstance(value, TensorSpec):
            yield value
        elif isinstance(value, list | tuple):
            yield from _specs(value)
