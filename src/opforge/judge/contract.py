"""Check everything an operator promises besides its numbers.

That is structure, dtype, shape, strides, aliasing, mutation, errors and global state.
"""

from __future__ import annotations

import cmath
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from opforge.cases.case import Expect
from opforge.cases.encoding import SHORT_DTYPES
from opforge.cases.materialise import tensor_over
from opforge.cases.values import contiguous_strides
from opforge.judge import bypass, properties
from opforge.judge.leftovers import undefined_elements
from opforge.judge.numerics import Comparison, same_bytes
from opforge.judge.reference import (
    Answer,
    Call,
    Exact,
    Gradients,
    ReferenceFaultError,
    ReferenceRaisedError,
    declined,
    end_without_device,
    plain,
    tensors_of,
    without_nan,
)
from opforge.judge.verdict import Finding, NotRightError, Outcome
from opforge.ops import Operator
from opforge.sandbox.origins import Origins

_GRADIENT_SLACK = 16.0
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Signed integers of the same size: torch has few operators for unsigned ones."""
_FEW = 1 << 18
"""Results up to this many elements are compared on the CPU, larger ones on ATen's device.

A GPU that many processes share is slow at small work."""


class ForgedReplyError(Exception):
    """A reply that opforge's own code in the worker cannot have written."""


_LOOKED_AT = 4096
_MANY = 32
"""Elements of a random result that are examined, and distinct values that count as many."""


@dataclass
class Hearing:
    """Judges one case from ATen's answer, the worker's reply and the bytes of the results."""

    op: Operator
    required: bool
    expect: Expect
    call: Call
    aten: Answer
    reply: dict[str, Any]
    results: Any
    """Private copy of the results in the arena."""
    results_at: int
    touched: list[int] = field(default_factory=list)
    """Inputs whose shared bytes changed although the operator does not write to them."""
    notes: list[str] = field(default_factory=list)
    values: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Result tensors of the kernel and of ATen, on the device of the comparison."""
    measure: bool = True
    """Whether to measure errors even where the kernel's bits equal ATen's."""
    inputs_too: bool = True
    """Whether the reply contains the inputs after the call, where they are not read in place."""

    @cached_property
    def exact(self) -> Exact:
        return Exact(self.call)

    @property
    def _by(self) -> str:
        return self.op.authority

    def finding(self) -> Finding:
        """Return the verdict on this case."""
        try:
            figures = self._judge()
        except NotRightError as error:
            return error.finding
        except (ForgedReplyError, KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            return Finding(Outcome.CONTRACT, f"the worker's reply is not one that our harness writes: {error}")
        except Exception as error:  # noqa: BLE001  # opforge or torch failed: report it and go on
            end_without_device(error)
            return Finding(Outcome.ERROR, f"opforge could not judge this case: {_one_line(error)}")
        return Finding(Outcome.PASSED, "", tuple(self.notes), figures)

    def _judge(self) -> dict[str, float]:
        if tried := self.reply.get("tried"):
            raise NotRightError(Outcome.CHEATED, str(tried))
        if "exited" in self.reply:
            raise NotRightError(
                Outcome.CRASHED, f"the kernel tried to end its process: SystemExit({self.reply['exited']})"
            )
        if self.expect is Expect.RAISES:
            return self._must_raise()
        if called := self.reply.get("bypass"):
            raise NotRightError(Outcome.CHEATED, bypass.reason(self.op, [str(name) for name in called]))
        if self.aten.raised is not None:
            return self._judge_without_answer(self.aten.raised)
        if "raised" in self.reply:
            raise self._raised(*self.reply["raised"])
        if changes := self.reply.get("state"):
            raise NotRightError(Outcome.CONTRACT, f"changed global state: {'; '.join(map(str, changes))}")
        self._check_inputs_unchanged()
        if through := self.reply.get("written_through"):
            raise NotRightError(
                Outcome.CONTRACT, f"wrote to the memory of which {self._name(through[0])} is a lazy clone"
            )
        if self.reply.get("late"):
            raise NotRightError(
                Outcome.CHEATED,
                "another stream was still at work after the call returned, and nothing waits for it",
            )
        if self.reply.get("shares_result"):
            raise NotRightError(
                Outcome.CONTRACT, "its result shares memory with that of an earlier call, which is still in use"
            )
        if odd := self.reply.get("odd"):
            raise NotRightError(Outcome.CONTRACT, str(odd))
        if self.reply.get("changed_later"):
            raise NotRightError(
                Outcome.CONTRACT,
                "its result changed after the call returned: a later call or a thread of its own writes to the same memory",
            )
        figures = self._inputs_after() if self.call.own and self.inputs_too else {}
        _merge(figures, self._results(self.reply["returned"], self.aten.result))
        return figures

    def _judge_without_answer(self, raised: Exception) -> dict[str, float]:
        """Judge a case that ATen or the reference does not answer.

        Raising is right where a user's reference raises. Otherwise there is nothing to compare.
        """
        if isinstance(raised, ReferenceFaultError):
            raise NotRightError(Outcome.ERROR, f"the reference {raised}")
        if not isinstance(raised, ReferenceRaisedError):
            raise NotRightError(Outcome.ERROR, f"ATen itself raises on this case: {_one_line(raised)}")
        if "raised" in self.reply:
            return self._must_raise()
        raise NotRightError(
            Outcome.ERROR, f"the reference raised {raised}; there is no answer to hold the kernel's against"
        )

    def _must_raise(self) -> dict[str, float]:
        if self.aten.raised is None:
            raise NotRightError(Outcome.ERROR, f"{self._by} was expected to raise on this case, and did not")
        if "raised" not in self.reply:
            raise NotRightError(
                Outcome.CONTRACT, f"{self._by} raises {_one_line(self.aten.raised)}; the kernel returned a result"
            )
        kind, text = self.reply["raised"]
        if kind == "NotImplementedError" and not declined(self.aten.raised):
            raise NotRightError(Outcome.UNSUPPORTED, f"the kernel declines: {text}")
        return {"raised": 1.0}

    def _raised(self, kind: str, text: str) -> NotRightError:
        if kind == "NotImplementedError" or not self.required:
            return NotRightError(Outcome.UNSUPPORTED, f"the kernel declines: {text}")
        return NotRightError(Outcome.ERROR, f"raised {text}")

    def _check_inputs_unchanged(self) -> None:
        if self.touched:
            raise NotRightError(
                Outcome.CONTRACT, f"wrote to {self._name(self.touched[0])}, which {self.op.name} must not change"
            )
        if changed := self.reply.get("reshaped"):
            raise NotRightError(Outcome.CONTRACT, f"changed the shape or strides of {self._name(changed[0])}")

    def _results(self, described: Any, result: Any) -> dict[str, float]:
        pairs = _pair_results(described, result, "result")
        labels: list[str] = []
        for label, reported, aten in pairs:
            if not isinstance(aten, torch.Tensor):
                _check_plain_value(label, reported, aten, self._by)
                continue
            kernel = self._tensor(label, reported, aten)
            self._check_aliasing(label, reported, aten)
            self.values.append((kernel, plain(aten).to(kernel.device)))
            labels.append(label)
        if (
            self.aten.drew
            and not self.measure
            and any(_draws_fewer_numbers(kernel, aten) for kernel, aten in self.values)
        ):
            raise NotRightError(Outcome.WRONG, "draws the same few numbers again and again")
        if self.aten.drew or self.op.base in properties.UNDEFINED_CONTENTS:
            return {}
        ruling = self._judge_by_property(labels)
        figures = dict(ruling.figures)
        for index, (label, (kernel, aten)) in enumerate(zip(labels, self.values, strict=True)):
            if index not in ruling.covered:
                _merge(figures, self._compare(label, kernel, aten, index))
        return figures

    def _judge_by_property(self, names: list[str]) -> properties.Ruling:
        """Judge results that may differ from ATen's by the property that makes them right."""
        judge = properties.BY_PACKET.get(self.op.packet)
        if judge is None or isinstance(self.call, Gradients) or all(same_bytes(k, a) for k, a in self.values):
            return properties.Ruling(frozenset())
        kernel = [k.cpu() for k, _ in self.values]
        aten = [a.cpu() for _, a in self.values]
        args, kwargs, _inputs = self.call.build()
        given = {n: v.cpu() if isinstance(v, torch.Tensor) else v for n, v in self.op.bind(args, kwargs).items()}
        ruling = judge(properties.Sight(self.op.packet, given, kernel, aten, names)) or properties.Ruling(frozenset())
        self.notes.extend([ruling.note] if ruling.note else [])
        return ruling

    def _tensor(self, label: str, reported: Any, aten: torch.Tensor) -> torch.Tensor:
        if not isinstance(reported, dict) or "T" not in reported:
            kind = reported["junk"] if isinstance(reported, dict) and "junk" in reported else type(reported).__name__
            raise NotRightError(Outcome.CONTRACT, f"{label} is {kind}, expected a tensor")
        if "class" in reported:
            raise NotRightError(
                Outcome.CHEATED, f"{label} is a {reported['class']}, a subclass of Tensor that may compute later"
            )
        row = reported["T"]
        if row[2] != SHORT_DTYPES[aten.dtype]:
            raise NotRightError(
                Outcome.CONTRACT, f"{label} has dtype {row[2]}, {self._by}'s has {SHORT_DTYPES[aten.dtype]}"
            )
        if row[3] != list(aten.shape):
            raise NotRightError(Outcome.CONTRACT, f"{label} has shape {row[3]}, {self._by}'s has {list(aten.shape)}")
        if torch.device(row[6]) != aten.device:
            raise NotRightError(Outcome.CONTRACT, f"{label} is on {row[6]}, {self._by}'s is on {aten.device}")
        self._strides(label, row[4], aten)
        contents = self._contents(row)
        return contents.to(aten.device) if contents.numel() > _FEW else contents

    def _strides(self, label: str, strides: Sequence[int], aten: torch.Tensor) -> None:
        if tuple(strides) == aten.stride() or aten.numel() <= 1:
            return
        if flat(aten.shape, aten.stride()) and not flat(aten.shape, strides):
            raise NotRightError(
                Outcome.CONTRACT,
                f"{label} has strides {tuple(strides)} and cannot be viewed flat; {self._by}'s {aten.stride()} can",
            )
        self.notes.append(f"{label} has strides {tuple(strides)}, {self._by}'s has {aten.stride()}")

    def _contents(self, row: list[Any]) -> torch.Tensor:
        start, nbytes, dtype, shape, _strides, _offset, _device = row
        if not (self.results_at <= start and start - self.results_at + nbytes <= len(self.results) and nbytes >= 0):
            raise ForgedReplyError(f"a result lies at {start}, outside its place")
        tensor = tensor_over(
            self.results, [start - self.results_at, nbytes, dtype, shape, contiguous_strides(tuple(shape)), 0, None]
        )
        if tensor.numel() * tensor.element_size() != nbytes:
            raise ForgedReplyError(f"{nbytes} bytes for shape {shape} of {dtype}")
        return tensor

    def _check_aliasing(self, label: str, reported: dict[str, Any], aten: torch.Tensor) -> None:
        if not aten.numel() and not self.op.mutates:
            return  # ATen returns an input where there is nothing to compute; no caller can tell
        expected_same = self._origins.same(aten)
        if reported.get("same", []) != expected_same:
            if expected_same:
                raise NotRightError(
                    Outcome.CONTRACT, f"{label} is not the very tensor that was given as {self._name(expected_same[0])}"
                )
            raise NotRightError(
                Outcome.CONTRACT, f"{label} is {self._name(reported['same'][0])} itself, not a new tensor"
            )
        shared = self.aten.shared
        expected = self._origins.sharing(aten) if shared is None else shared.get(id(aten), [])
        aliases = reported.get("alias", [])
        if aliases and not expected:
            raise NotRightError(
                Outcome.CONTRACT, f"{label} shares memory with {self._name(aliases[0])}; {self._by}'s is new memory"
            )
        if expected and not aliases and aten.numel():
            raise NotRightError(
                Outcome.CONTRACT, f"{label} is new memory; {self._by}'s is a view of {self._name(expected[0])}"
            )

    def _compare(self, label: str, kernel: torch.Tensor, aten: torch.Tensor, index: int) -> dict[str, float]:
        """Compare numbers; elements that ATen leaves uninitialised are not judged."""
        try:
            return self._comparison(label, kernel, aten, index).check(measure=self.measure)
        except NotRightError:
            undefined = undefined_elements(
                self.call, aten, index, may_be_nan=self.op.base in properties.PARTLY_UNDEFINED
            )
            if undefined is None or not undefined.any():
                raise
            judged = kernel.clone()
            judged.view(_SIGNED.get(aten.dtype, aten.dtype))[undefined] = aten.view(
                _SIGNED.get(aten.dtype, aten.dtype)
            )[undefined]
            figures = self._comparison(label, judged, aten, index).check(measure=self.measure)
            self.notes.append(
                f"{label}: {int(undefined.sum())} of {aten.numel()} elements are uninitialised in {self._by}, and not judged"
            )
            return figures

    def _comparison(self, label: str, kernel: torch.Tensor, aten: torch.Tensor, index: int) -> Comparison:
        slack = _GRADIENT_SLACK if isinstance(self.call, Gradients) else 0.0
        undecided = functools.partial(self._undecided, index)
        return Comparison(
            kernel, aten, self.exact, index, label, self._reduction(aten), undecided, slack, self._by,
            signed_zeros=not isinstance(self.call, Gradients)
            and properties.zeros_have_signs(self.op, is_complex=aten.is_complex()),
        )  # fmt: skip

    def _undecided(self, index: int) -> torch.Tensor | None:
        """Return where infinities alone make a result NaN; None for pointwise operators."""
        if "pointwise" in self.op.tags:
            return None
        tensors = self.call.run(without_nan).tensors
        return None if tensors is None else tensors[index].detach().isnan()

    def _inputs_after(self) -> dict[str, float]:
        """Compare every input after the call: written ones numerically, the others bit for bit."""
        figures: dict[str, float] = {}
        count = len(tensors_of(self.aten.result))
        undefined = self.aten.drew or self.op.base in properties.UNDEFINED_CONTENTS
        for i, (row, aten) in enumerate(zip(self.reply["inputs"], self.aten.inputs, strict=True)):
            label = f"{self._name(i)} after the call"
            kernel = self._tensor(label, {"T": row}, aten)
            after = plain(aten).to(kernel.device)
            same = same_bytes(kernel, after)
            if same and not self.measure:
                continue
            before = plain(self._originals[i]).to(kernel.device) if self._writes else after
            written = before.shape != after.shape or (before is not after and not same_bytes(before, after))
            if not written and not same and not self._is_written(i):
                raise NotRightError(Outcome.CONTRACT, f"wrote to {self._name(i)}, which {self._by} left alone")
            if (written or not same) and not undefined:
                untouched = written and kernel.shape == before.shape and same_bytes(kernel, before) and kernel.numel()
                try:
                    if not (self._is_written(i) and self.op.packet in properties.BY_PACKET):  # judged among the results
                        _merge(figures, self._compare(label, kernel, after, count + i))
                except NotRightError as error:
                    raise self._unwritten(i) if untouched else error from None
        return figures

    @cached_property
    def _originals(self) -> list[torch.Tensor]:
        """The inputs as they were before the call."""
        return self.call.build()[2]

    @property
    def _writes(self) -> bool:
        """Whether the operator may write to its inputs; on a GPU all replies include inputs."""
        return self.op.mutates or self.op.base in properties.WRITES_UNSAID or self.aten.shared is not None

    def _unwritten(self, index: int) -> NotRightError:
        return NotRightError(
            Outcome.CONTRACT, f"did not write to {self._name(index)}, which {self.op.name} must change"
        )

    def _name(self, index: int) -> str:
        """Return the schema's name of an input tensor, such as ``self`` or ``tensors[1]``."""
        names = self._names
        return f"`{names[index]}`" if 0 <= index < len(names) else f"input tensor {index}"

    @functools.cached_property
    def _names(self) -> list[str]:
        return list(tensor_names(self.op, self.call))

    def _is_written(self, index: int) -> bool:
        """Whether ATen returns this input as a result, as in-place and out variants do."""
        return index in self._returned_inputs

    @cached_property
    def _origins(self) -> Origins:
        return Origins(self.aten.inputs)

    @cached_property
    def _returned_inputs(self) -> frozenset[int]:
        return frozenset(number for t in tensors_of(self.aten.result) for number in self._origins.same(t))

    def _reduction(self, aten: torch.Tensor) -> float:
        sizes = sorted((t.numel() for t in self.aten.inputs if t.is_floating_point() or t.is_complex()), reverse=True)
        if not sizes or not aten.numel():
            return 1.0
        product = math.sqrt(sizes[0] * sizes[1] / aten.numel()) if len(sizes) > 1 else 1.0
        return max(1.0, float(sizes[0] / aten.numel()), product)


def flat(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor can be viewed as one dimension without a copy."""
    kept = [(size, step) for size, step in zip(shape, strides, strict=True) if size != 1]
    return all(step == inner_size * inner_step for (_, step), (inner_size, inner_step) in itertools.pairwise(kept))


def tensor_names(op: Operator, call: Call) -> Iterator[str]:
    """Yield the names of a call's tensors, in order."""
    for argument, value in zip(op.arguments, call.args, strict=False):
        yield from _names_in(argument.name, value)
    for name, value in call.kwargs.items():
        yield from _names_in(name, value)


def _names_in(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict) and "T" in value:
        yield name
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield from _names_in(f"{name}[{position}]", item)


def _pair_results(described: Any, result: Any, label: str) -> list[tuple[str, Any, Any]]:
    if not isinstance(result, list | tuple):
        return [(label, described, result)]
    if not isinstance(described, list) or len(described) != len(result):
        got = f"{len(described)} values" if isinstance(described, list) else "one value"
        raise NotRightError(Outcome.CONTRACT, f"{label} is {got}, expected {len(result)}")
    return [
        pair
        for i, (d, r) in enumerate(zip(described, result, strict=True))
        for pair in _pair_results(d, r, f"{label}[{i}]")
    ]


def _check_plain_value(label: str, reported: Any, aten: Any, authority: str) -> None:
    value = complex(*reported["complex"]) if isinstance(reported, dict) and "complex" in reported else reported
    if isinstance(aten, torch.dtype):
        value, aten = (reported or {}).get("dtype") if isinstance(reported, dict) else reported, SHORT_DTYPES.get(aten)
    if type(value) is not type(aten):
        raise NotRightError(Outcome.CONTRACT, f"{label} is {_kind(reported)}, expected {type(aten).__name__}")
    same = value == aten or (isinstance(aten, float | complex) and cmath.isnan(aten) and cmath.isnan(value))
    if isinstance(aten, float | complex) and not same:
        same = abs(value - aten) <= 1e-6 * abs(aten)
    if not same:
        raise NotRightError(Outcome.WRONG, f"{label} is {value!r}, {authority} has {aten!r}")


def _kind(reported: Any) -> str:
    if isinstance(reported, dict):
        return str(reported.get("junk", "a tensor"))
    return "nothing (None)" if reported is None else type(reported).__name__


def _merge(figures: dict[str, float], others: dict[str, float]) -> None:
    """Keep the figures of the tensor with the largest kernel error."""
    if others and others.get("kernel_error", 0.0) >= figures.get("kernel_error", -1.0):
        figures.update(others)


def _one_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300] if text else ''}"


def _draws_fewer_numbers(kernel: torch.Tensor, aten: torch.Tensor) -> bool:
    """Whether the kernel draws few distinct numbers where ATen draws many."""
    return is_varied(aten) and different_numbers(kernel) < different_numbers(aten) / 4


def is_varied(drawn: torch.Tensor) -> bool:
    """Whether a random result has many distinct numbers: no two such results match by chance."""
    return different_numbers(drawn) >= _MANY


def different_numbers(drawn: torch.Tensor) -> int:
    """Return the number of distinct values among the first elements of a result."""
    plain = torch.view_as_real(drawn.resolve_conj()) if drawn.is_complex() else drawn
    return int(plain.detach().reshape(-1)[:_LOOKED_AT].double().unique().numel())
