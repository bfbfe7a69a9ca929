"""Check everything an operator promises besides its numbers.

That is structure, dtype, shape, strides, aliasing, mutation, errors and global state. A call of the
operator that the kernel replaces is rejected here too.
"""

from __future__ import annotations

import cmath
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from opforge.cases.case import Expect
from opforge.cases.tensors import same_bytes, tensor_from_row
from opforge.cases.wire import SHORT_DTYPES
from opforge.judge import forbidden_calls
from opforge.judge.compare.numerics import Comparison, reduction_length
from opforge.judge.compare.properties.property_check import Accepted, Results
from opforge.judge.compare.properties.signed_zeros import zero_signs_matter
from opforge.judge.compare.uninitialised import uninitialised_elements
from opforge.judge.facts import facts_of
from opforge.judge.reference.aten import (
    MAX_CPU_COMPARE_ELEMENTS,
    CallOutcome,
    Float64Answers,
    GradientCall,
    ReferenceCall,
    ReferenceFaultError,
    ReferenceRaisedError,
    abort_if_gpu_lost,
    is_not_implemented,
    resolved,
    without_nan,
)
from opforge.judge.verdict import RejectedError, Verdict, VerdictKind
from opforge.ops import Operator
from opforge.ops.undefined import UNDEFINED_CONTENTS
from opforge.runtime.trees import instances
from opforge.sandbox.guest.aliases import InputAliases
from opforge.sandbox.host.reply import (
    MALFORMED_REPLY,
    CallReply,
    MalformedReplyError,
    ReportedDtype,
    ReportedObject,
    ReportedTensor,
    Returned,
)

_GRADIENT_SLACK = 16.0
_SIGNED_DTYPES = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Signed integers of the same size: torch has few operators for unsigned ones."""
_MAX_EXAMINED_ELEMENTS = 4096
_MIN_MANY_VALUES = 32
"""Elements of a random result that are examined, and distinct values that count as many."""


@dataclass
class CaseCheck:
    """Judges one case from ATen's answer, the worker's reply and the bytes of the results."""

    op: Operator
    required: bool
    expect: Expect
    call: ReferenceCall
    aten: CallOutcome
    reply: CallReply
    results: Any
    """Private copy of the results in the arena."""
    results_offset: int
    changed_inputs: list[int] = field(default_factory=list)
    """Inputs whose shared bytes changed although the operator does not write to them."""
    notes: list[str] = field(default_factory=list)
    result_pairs: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Result tensors of the kernel and of ATen, on the device of the comparison."""
    measure_errors: bool = True
    """Whether to measure errors even where the kernel's bits equal ATen's."""
    reply_has_inputs: bool = True
    """Whether the reply contains the inputs after the call, where they are not read in place."""

    @cached_property
    def exact(self) -> Float64Answers:
        return Float64Answers(self.call)

    @property
    def _authority(self) -> str:
        return self.op.reference_name

    def verdict(self) -> Verdict:
        """Return the verdict on this case."""
        try:
            figures = self._judge()
        except RejectedError as error:
            return error.verdict
        except MalformedReplyError as error:
            return Verdict(VerdictKind.CONTRACT, str(error))
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            return Verdict(VerdictKind.CONTRACT, f"{MALFORMED_REPLY}: {error}")
        except Exception as error:  # noqa: BLE001  # opforge or torch failed: report it and go on
            abort_if_gpu_lost(error)
            return Verdict(VerdictKind.ERROR, f"opforge could not judge this case: {_one_line(error)}")
        return Verdict(VerdictKind.PASSED, "", tuple(self.notes), figures)

    def _judge(self) -> dict[str, float]:
        reply = self.reply
        if reply.escape_attempts:
            raise RejectedError(VerdictKind.CHEATED, reply.escape_attempts)
        if reply.exited is not None:
            raise RejectedError(VerdictKind.CRASHED, f"the kernel tried to end its process: SystemExit({reply.exited})")
        if self.expect is Expect.RAISES:
            return self._check_raised()
        if reply.bypass:
            raise RejectedError(VerdictKind.CHEATED, forbidden_calls.describe(self.op, list(reply.bypass)))
        if self.aten.raised is not None:
            return self._judge_without_answer(self.aten.raised)
        if reply.raised is not None:
            raise self._rejection_for(*reply.raised)
        changes = reply.state_changes
        if changes and not (self.aten.turned_onednn_off and changes == ("onednn: True became False",)):
            raise RejectedError(VerdictKind.CONTRACT, f"changed global state: {'; '.join(changes)}")
        self._check_inputs_unchanged()
        if through := reply.written_through:
            raise RejectedError(
                VerdictKind.CONTRACT, f"wrote to the memory that {self._name(through[0])} is a lazy clone of"
            )
        if reply.late:
            raise RejectedError(
                VerdictKind.CHEATED,
                "another stream was still busy after the call returned, and nothing waits for it",
            )
        if reply.shares_result:
            raise RejectedError(
                VerdictKind.CONTRACT, "its result shares memory with that of an earlier call, which is still in use"
            )
        if reply.unusable:
            raise RejectedError(VerdictKind.CONTRACT, reply.unusable)
        if reply.changed_later:
            raise RejectedError(
                VerdictKind.CONTRACT,
                "its result changed after the call returned: a later call or a thread of its own writes to the same "
                "memory",
            )
        self._require_wellformed_reply()
        figures = self._check_inputs_after() if self.call.owns_storage and self.reply_has_inputs else {}
        _keep_worst(figures, self._check_results(reply.returned, self.aten.result))
        return figures

    def _require_wellformed_reply(self) -> None:
        if self.reply.malformed:
            raise MalformedReplyError(self.reply.malformed)

    def _judge_without_answer(self, raised: Exception) -> dict[str, float]:
        """Judge a case that ATen or the reference does not answer.

        Raising is right where a user's reference raises. Otherwise there is nothing to compare.
        """
        if isinstance(raised, ReferenceFaultError):
            raise RejectedError(VerdictKind.ERROR, f"the reference {raised}")
        if not isinstance(raised, ReferenceRaisedError):
            raise RejectedError(VerdictKind.ERROR, f"ATen itself raises on this case: {_one_line(raised)}")
        if self.reply.raised is not None:
            return self._check_raised()
        raise RejectedError(VerdictKind.ERROR, f"the reference raised {raised}, so there is nothing to compare with")

    def _check_raised(self) -> dict[str, float]:
        if self.aten.raised is None:
            raise RejectedError(VerdictKind.ERROR, f"{self._authority} was expected to raise on this case, and did not")
        if self.reply.raised is None:
            self._require_wellformed_reply()
            raise RejectedError(
                VerdictKind.CONTRACT,
                f"{self._authority} raises {_one_line(self.aten.raised)}; the kernel returned a result",
            )
        kind, text = self.reply.raised
        if kind == "NotImplementedError" and not is_not_implemented(self.aten.raised):
            raise RejectedError(VerdictKind.UNSUPPORTED, f"the kernel declines: {text}")
        return {"raised": 1.0}

    def _rejection_for(self, kind: str, text: str) -> RejectedError:
        if kind == "NotImplementedError" or not self.required:
            return RejectedError(VerdictKind.UNSUPPORTED, f"the kernel declines: {text}")
        return RejectedError(VerdictKind.ERROR, f"raised {text}")

    def _check_inputs_unchanged(self) -> None:
        if self.changed_inputs:
            raise RejectedError(
                VerdictKind.CONTRACT,
                f"wrote to {self._name(self.changed_inputs[0])}, which {self.op.name} must not change",
            )
        if changed := self.reply.reshaped:
            raise RejectedError(VerdictKind.CONTRACT, f"changed the shape or strides of {self._name(changed[0])}")

    def _check_results(self, described: Returned, result: Any) -> dict[str, float]:
        pairs = _pair_results(described, result, "result")
        labels: list[str] = []
        for label, reported, aten in pairs:
            if not isinstance(aten, torch.Tensor):
                _check_plain_value(label, reported, aten, self._authority)
                continue
            if not isinstance(reported, ReportedTensor):
                kind = "NoneType" if reported is None else _type_name(reported)
                raise RejectedError(VerdictKind.CONTRACT, f"{label} is {kind}, expected a tensor")
            kernel = self._check_tensor(label, reported, aten)
            self._check_aliasing(label, reported, aten)
            self.result_pairs.append((kernel, resolved(aten).to(kernel.device)))
            labels.append(label)
        if (
            self.aten.used_rng
            and not self.measure_errors
            and any(_draws_fewer_numbers(kernel, aten) for kernel, aten in self.result_pairs)
        ):
            raise RejectedError(VerdictKind.WRONG, "returns the same few random numbers again and again")
        if self.aten.used_rng or self.op.base in UNDEFINED_CONTENTS:
            return {}
        accepted = self._judge_by_property(labels)
        figures = dict(accepted.figures)
        for index, (label, (kernel, aten)) in enumerate(zip(labels, self.result_pairs, strict=True)):
            if index not in accepted.result_indices:
                _keep_worst(figures, self._compare(label, kernel, aten, index))
        return figures

    def _judge_by_property(self, names: list[str]) -> Accepted:
        """Judge results that may differ from ATen's by the property that makes them right."""
        check = facts_of(self.op).property_check
        if check is None or isinstance(self.call, GradientCall) or all(same_bytes(k, a) for k, a in self.result_pairs):
            return Accepted(frozenset())
        kernel = [k.cpu() for k, _ in self.result_pairs]
        aten = [a.cpu() for _, a in self.result_pairs]
        args, kwargs, _inputs = self.call.build_arguments()
        given = {n: v.cpu() if isinstance(v, torch.Tensor) else v for n, v in self.op.bind(args, kwargs).items()}
        accepted = check(Results(self.op.packet, given, kernel, aten, names)) or Accepted(frozenset())
        self.notes.extend([accepted.note] if accepted.note else [])
        return accepted

    def _check_tensor(self, label: str, reported: ReportedTensor, aten: torch.Tensor) -> torch.Tensor:
        if reported.subclass:
            raise RejectedError(
                VerdictKind.CHEATED, f"{label} is a {reported.subclass}, a subclass of Tensor that may compute later"
            )
        dtype, shape = SHORT_DTYPES[aten.dtype], list(aten.shape)
        if reported.dtype != dtype:
            raise RejectedError(
                VerdictKind.CONTRACT, f"{label} has dtype {reported.dtype}, {self._authority}'s has {dtype}"
            )
        if list(reported.shape) != shape:
            raise RejectedError(
                VerdictKind.CONTRACT, f"{label} has shape {list(reported.shape)}, {self._authority}'s has {shape}"
            )
        if _device(reported.device) != aten.device:
            raise RejectedError(
                VerdictKind.CONTRACT, f"{label} is on {reported.device}, {self._authority}'s is on {aten.device}"
            )
        self._check_strides(label, reported.strides, aten)
        contents = tensor_from_row(self.results, reported.row(self.results_offset))
        return contents.to(aten.device) if contents.numel() > MAX_CPU_COMPARE_ELEMENTS else contents

    def _check_strides(self, label: str, strides: Sequence[int], aten: torch.Tensor) -> None:
        if tuple(strides) == aten.stride() or aten.numel() <= 1:
            return
        if can_view_flat(aten.shape, aten.stride()) and not can_view_flat(aten.shape, strides):
            raise RejectedError(
                VerdictKind.CONTRACT,
                f"{label} has strides {tuple(strides)} and cannot be viewed flat; {self._authority}'s {aten.stride()} "
                "can",
            )
        self.notes.append(f"{label} has strides {tuple(strides)}, {self._authority}'s has {aten.stride()}")

    def _check_aliasing(self, label: str, reported: ReportedTensor, aten: torch.Tensor) -> None:
        if not aten.numel() and not self.op.mutates:
            return  # ATen returns an input where there is nothing to compute; no caller can tell
        expected_same = self._origins.identical(aten)
        if list(reported.same) != expected_same:
            if expected_same:
                raise RejectedError(
                    VerdictKind.CONTRACT,
                    f"{label} is not the tensor passed as {self._name(expected_same[0])}",
                )
            raise RejectedError(
                VerdictKind.CONTRACT, f"{label} is {self._name(reported.same[0])} itself, not a new tensor"
            )
        shared = self.aten.shared_inputs
        expected = self._origins.sharing_memory(aten) if shared is None else shared.get(id(aten), [])
        if reported.aliases and not expected:
            raise RejectedError(
                VerdictKind.CONTRACT,
                f"{label} shares memory with {self._name(reported.aliases[0])}; {self._authority}'s is new memory",
            )
        if expected and not reported.aliases and aten.numel():
            raise RejectedError(
                VerdictKind.CONTRACT,
                f"{label} is new memory; {self._authority}'s is a view of {self._name(expected[0])}",
            )

    def _compare(self, label: str, kernel: torch.Tensor, aten: torch.Tensor, index: int) -> dict[str, float]:
        """Compare numbers; elements that ATen leaves uninitialised are not judged."""
        try:
            return self._make_comparison(label, kernel, aten, index).check(measure=self.measure_errors)
        except RejectedError:
            undefined = uninitialised_elements(
                self.call, aten, index, may_be_nan=facts_of(self.op).nan_is_uninitialised
            )
            if undefined is None or not undefined.any():
                raise
            judged = kernel.clone()
            judged.view(_SIGNED_DTYPES.get(aten.dtype, aten.dtype))[undefined] = aten.view(
                _SIGNED_DTYPES.get(aten.dtype, aten.dtype)
            )[undefined]
            figures = self._make_comparison(label, judged, aten, index).check(measure=self.measure_errors)
            self.notes.append(
                f"{label}: {int(undefined.sum())} of {aten.numel()} elements are uninitialised in {self._authority}, "
                "and not judged"
            )
            return figures

    def _make_comparison(self, label: str, kernel: torch.Tensor, aten: torch.Tensor, index: int) -> Comparison:
        slack = _GRADIENT_SLACK if isinstance(self.call, GradientCall) else 0.0
        undecided = functools.partial(self._undecided, index)
        return Comparison(
            kernel, aten, self.exact, index, label, reduction_length(self.aten.inputs, aten), undecided, slack,
            self._authority,
            zero_signs_matter=not isinstance(self.call, GradientCall)
            and zero_signs_matter(self.op, is_complex=aten.is_complex()),
        )  # fmt: skip

    def _undecided(self, index: int) -> torch.Tensor | None:
        """Return where infinities alone make a result NaN; None for pointwise operators."""
        if "pointwise" in self.op.tags:
            return None
        tensors = self.call.run(without_nan).tensors
        return None if tensors is None else tensors[index].detach().isnan()

    def _check_inputs_after(self) -> dict[str, float]:
        """Compare every input after the call: written ones numerically, the others bit for bit."""
        figures: dict[str, float] = {}
        count = len(list(instances(self.aten.result, torch.Tensor)))
        undefined = self.aten.used_rng or self.op.base in UNDEFINED_CONTENTS
        if self.reply.inputs is None:
            raise MalformedReplyError("it has no inputs")
        for i, (reported, aten) in enumerate(zip(self.reply.inputs, self.aten.inputs, strict=True)):
            label = f"{self._name(i)} after the call"
            if reported is None:
                raise MalformedReplyError("it lacks an input")
            kernel = self._check_tensor(label, reported, aten)
            after = resolved(aten).to(kernel.device)
            same = same_bytes(kernel, after)
            if same and not self.measure_errors:
                continue
            before = resolved(self._originals[i]).to(kernel.device) if self._may_write_inputs else after
            written = before.shape != after.shape or (before is not after and not same_bytes(before, after))
            if not written and not same and not self._is_written(i):
                raise RejectedError(
                    VerdictKind.CONTRACT, f"wrote to {self._name(i)}, which {self._authority} left alone"
                )
            if (written or not same) and not undefined:
                untouched = written and kernel.shape == before.shape and same_bytes(kernel, before) and kernel.numel()
                try:
                    if not (
                        self._is_written(i) and facts_of(self.op).property_check is not None
                    ):  # judged among the results
                        _keep_worst(figures, self._compare(label, kernel, after, count + i))
                except RejectedError as error:
                    raise self._not_written(i) if untouched else error from None
        return figures

    @cached_property
    def _originals(self) -> list[torch.Tensor]:
        """The inputs as they were before the call, on the CPU."""
        return replace(self.call, device=torch.device("cpu")).build_arguments()[2]

    @property
    def _may_write_inputs(self) -> bool:
        """Whether the operator may write to its inputs; on a GPU all replies include inputs."""
        return self.op.mutates or facts_of(self.op).undeclared_writes or self.aten.shared_inputs is not None

    def _not_written(self, index: int) -> RejectedError:
        return RejectedError(
            VerdictKind.CONTRACT, f"did not write to {self._name(index)}, which {self.op.name} must change"
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
    def _origins(self) -> InputAliases:
        return InputAliases(self.aten.inputs)

    @cached_property
    def _returned_inputs(self) -> frozenset[int]:
        return frozenset(
            number for t in instances(self.aten.result, torch.Tensor) for number in self._origins.identical(t)
        )


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError:
        raise MalformedReplyError("a tensor is on no device") from None


def can_view_flat(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor can be viewed as one dimension without a copy."""
    kept = [(size, step) for size, step in zip(shape, strides, strict=True) if size != 1]
    return all(step == inner_size * inner_step for (_, step), (inner_size, inner_step) in itertools.pairwise(kept))


def tensor_names(op: Operator, call: ReferenceCall) -> Iterator[str]:
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


def _pair_results(described: Returned, result: Any, label: str) -> list[tuple[str, Returned, Any]]:
    if not isinstance(result, list | tuple):
        return [(label, described, result)]
    if not isinstance(described, list) or len(described) != len(result):
        got = f"{len(described)} values" if isinstance(described, list) else "one value"
        raise RejectedError(VerdictKind.CONTRACT, f"{label} is {got}, expected {len(result)}")
    return [
        pair
        for i, (d, r) in enumerate(zip(described, result, strict=True))
        for pair in _pair_results(d, r, f"{label}[{i}]")
    ]


def _check_plain_value(label: str, reported: Returned, aten: Any, authority: str) -> None:
    value: Any = reported.short if isinstance(reported, ReportedDtype) else reported
    aten = SHORT_DTYPES.get(aten) if isinstance(aten, torch.dtype) else aten
    if type(value) is not type(aten):
        raise RejectedError(VerdictKind.CONTRACT, f"{label} is {_type_name(reported)}, expected {type(aten).__name__}")
    same = value == aten or (isinstance(aten, float | complex) and cmath.isnan(aten) and cmath.isnan(value))
    if isinstance(aten, float | complex) and not same:
        same = abs(value - aten) <= 1e-6 * abs(aten)
    if not same:
        raise RejectedError(VerdictKind.WRONG, f"{label} is {value!r}, {authority} has {aten!r}")


def _type_name(reported: Returned) -> str:
    match reported:
        case ReportedObject(kind):
            return kind
        case ReportedTensor():
            return "a tensor"
        case ReportedDtype():
            return "a dtype"
    return "nothing (None)" if reported is None else type(reported).__name__


def _keep_worst(figures: dict[str, float], others: dict[str, float]) -> None:
    """Keep the figures of the tensor with the largest kernel error."""
    if others and others.get("kernel_error", 0.0) >= figures.get("kernel_error", -1.0):
        figures.update(others)


def _one_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300] if text else ''}"


def _draws_fewer_numbers(kernel: torch.Tensor, aten: torch.Tensor) -> bool:
    """Whether the kernel draws few distinct numbers where ATen draws many."""
    return has_many_values(aten) and count_distinct(kernel) < count_distinct(aten) / 4


def has_many_values(draw: torch.Tensor) -> bool:
    """Whether a random result has many distinct numbers: no two such results match by chance."""
    return count_distinct(draw) >= _MIN_MANY_VALUES


def count_distinct(draw: torch.Tensor) -> int:
    """Return the number of distinct values among the first elements of a result."""
    plain = torch.view_as_real(draw.resolve_conj()) if draw.is_complex() else draw
    return int(plain.detach().reshape(-1)[:_MAX_EXAMINED_ELEMENTS].double().unique().numel())
