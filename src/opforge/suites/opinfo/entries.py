"""Run the samples of one OpInfo entry, forward and backward, under a recorder."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from opforge.ops import table
from opforge.runtime.trees import instances, map_instances
from opforge.suites.opinfo.case_recorder import CaseRecorder, RecordingMode, call_aten


def all_entries() -> list[Any]:
    """Return OpInfo's database. The import is slow, so only the recording process calls this."""
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo import core

    for module in (common_utils, core):
        if hasattr(module, "extract_test_fn"):
            module.extract_test_fn = _no_test
    return list(op_db)


def selected_entries(names: tuple[str, ...]) -> tuple[list[Any], list[str]]:
    """Return the entries with these names (all if empty), and the names without an entry."""
    entries = all_entries()
    if not names:
        return entries, []
    chosen = [entry for entry in entries if name_of(entry) in names]
    return chosen, sorted(set(names) - set(map(name_of, chosen)))


def _no_test() -> None:
    """Replace OpInfo's search for the calling unit test.

    OpInfo calls it twice per entry, and the original reads the source of every stack frame.
    """


def name_of(entry: Any) -> str:
    """Return an entry's name with its variant, as PyTorch's tests print it."""
    name: str = entry.formatted_name
    return name


def seed(entry: Any) -> None:
    """Make the samples of an entry the same in every process."""
    number = zlib.crc32(name_of(entry).encode())
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002  # OpInfo's sample functions draw from it
    torch.manual_seed(number)


def record_samples(entry: Any, device: str, dtype: torch.dtype, recorder: CaseRecorder) -> None:
    """Record every sample of an entry in one dtype."""
    kind = torch.device(device).type
    if not entry.supports_dtype(dtype, kind):
        return
    seed(entry)
    recorder.begin_entry()
    for sample in _until_error(entry.sample_inputs(device, dtype, requires_grad=False), recorder, entry):
        _attempt(_forward, entry, sample, recorder)
        _attempt(_composite, entry, sample, recorder)
        if entry.inplace_variant is not None:
            _attempt(_inplace, entry, sample, recorder)
    if entry.supports_autograd and dtype in entry.supported_backward_dtypes(kind):
        for sample in _until_error(entry.sample_inputs(device, dtype, requires_grad=True), recorder, entry):
            _attempt(_backward, entry, sample, recorder)


def record_errors(entry: Any, device: str, recorder: CaseRecorder) -> None:
    """Record the calls on an entry's invalid inputs, for which ATen raises."""
    if entry.error_inputs_func is None:
        return
    seed(entry)
    recorder.phase = "error"
    for error_input in _until_error(entry.error_inputs(device), recorder, entry):
        sample = error_input.sample_input
        try:
            with torch.no_grad(), RecordingMode(recorder):
                entry(sample.input, *sample.args, **sample.kwargs)
        except Exception:  # noqa: BLE001, S112  # expected; a dispatched call is recorded
            continue


def _until_error(samples: Iterator[Any], recorder: CaseRecorder, entry: Any) -> Iterator[Any]:
    """Yield samples until their generator raises, and count the error as a loss."""
    iterator = iter(samples)
    while True:
        try:
            sample = next(iterator)
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001  # OpInfo's sample functions may raise anything
            recorder.losses[f"{name_of(entry)}: its samples raised {type(error).__name__}: {str(error)[:120]}"] += 1
            return
        yield sample


def _attempt(action: Callable[[Any, Any, CaseRecorder], None], entry: Any, sample: Any, recorder: CaseRecorder) -> None:
    try:
        action(entry, sample, recorder)
    except Exception as error:  # noqa: BLE001  # ATen or OpInfo raised: count the sample as lost
        first_line = (str(error).splitlines() or [""])[0]
        recorder.losses[
            f"{name_of(entry)}: {action.__name__.strip('_')} sample raised {type(error).__name__}: {first_line[:120]}"
        ] += 1


def _forward(entry: Any, sample: Any, recorder: CaseRecorder) -> None:
    recorder.phase = "forward"
    with torch.no_grad(), RecordingMode(recorder):
        entry(_detached(sample.input), *_detached(sample.args), **_detached(sample.kwargs))


def _inplace(entry: Any, sample: Any, recorder: CaseRecorder) -> None:
    recorder.phase = "variant"
    target = _detached(sample.input)
    if isinstance(target, torch.Tensor) and sample.broadcasts_input:
        return
    try:
        with torch.no_grad(), RecordingMode(recorder):
            entry.inplace_variant(_cloned(target), *_detached(sample.args), **_detached(sample.kwargs))
    except Exception:  # noqa: BLE001  # many samples are invalid in place (dtype, overlap): no case
        return


def _backward(entry: Any, sample: Any, recorder: CaseRecorder) -> None:
    recorder.phase = "forward"  # with gradients the forward call may dispatch differently
    mode = RecordingMode(recorder)
    with torch.enable_grad():
        with mode:
            result = entry(sample.input, *sample.args, **sample.kwargs)
            result = sample.output_process_fn_grad(result) if sample.output_process_fn_grad else result
        outputs = [t for t in instances(result, torch.Tensor) if t.requires_grad]
        inputs = [
            t
            for t in instances([sample.input, sample.args, sample.kwargs], torch.Tensor)
            if t.requires_grad and t.is_leaf
        ]
        if not outputs or not inputs:
            return
        grads = [torch.randn_like(t) for t in outputs]
        recorder.phase = "backward"
        with mode:
            torch.autograd.grad(outputs, inputs, grads, allow_unused=True)


def _composite(entry: Any, sample: Any, recorder: CaseRecorder) -> None:
    """Record the call of a composite operator, which dispatch decomposes before a recorder."""
    packet = getattr(torch.ops.aten, entry.aten_name or "", None)
    if packet is None:
        return
    args = [_detached(sample.input), *_detached(sample.args)]
    kwargs = _detached(sample.kwargs)
    try:
        overload = torch._C._jit_resolve_packet(f"aten::{entry.aten_name}", *args, **kwargs)  # noqa: SLF001
    except RuntimeError:
        return  # OpInfo's function and the operator have different signatures
    op = f"{entry.aten_name}.{overload or 'default'}"
    facts = table().get(op)
    if facts is None or not facts.composite:
        return
    recorder.phase = "composite"
    finish = recorder.begin_call(op, args, kwargs)
    if finish is None:
        return
    try:
        result = call_aten(op, _cloned(args), _cloned(kwargs))
    except (TypeError, RuntimeError, IndexError, ValueError):
        return  # the operator itself rejects arguments that the Python function takes
    finish(False, result)
    recorder.record_other_kinds(op, args, kwargs)


def _detached(tree: Any) -> Any:
    return map_instances(tree, torch.Tensor, torch.Tensor.detach)


def _cloned(tree: Any) -> Any:
    return map_instances(tree, torch.Tensor, lambda t: t.detach().clone())
