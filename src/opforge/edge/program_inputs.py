"""Inputs and outputs of a program. Inputs come from text or a file, or as the program describes them.

Only the child imports this.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from opforge.cases.tensors import seeded_bytes
from opforge.cases.text import format_arguments, format_value, parse_arguments
from opforge.cases.values import SHORT_NAMES, TensorSpec
from opforge.cases.wire import TORCH_DTYPES, from_torch
from opforge.edge.run import ProgramJob, ProgramOutput
from opforge.errors import OpforgeError

_DTYPES_BY_NUMBER = dict(enumerate(("u8", "i8", "i16", "i32", "i64", "f16", "f32", "f64"))) | {11: "b8", 15: "bf16"}
"""Dtypes by their numbers in the runtime."""


def inputs_text(inputs: tuple[Any, ...]) -> str:
    """Return the text form of inputs: shapes and dtypes, not contents."""
    return format_arguments([from_torch(value, _tensor_spec) for value in inputs], {})


def value_text(value: Any) -> str:
    """Return the text form of one argument."""
    return format_value(from_torch(value, _tensor_spec))


def _tensor_spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), SHORT_NAMES[str(tensor.dtype).removeprefix("torch.")])


def flatten(values: Any) -> list[Any]:
    """Return inputs flattened as the runtime takes them, lists and dicts included."""
    return list(torch.utils._pytree.tree_leaves(values))  # noqa: SLF001  # as torch.export does it


def job_inputs(job: ProgramJob, metadata: Any) -> list[Any]:
    """Return the inputs that a job gives, else inputs as the program describes them."""
    if job.tensors_file:
        values = load_values(job.tensors_file, job.non_tensors)
    elif job.inputs_file:
        values = _load_inputs(job.inputs_file)
    elif job.inputs_text:
        values = _inputs_from_text(job.inputs_text, job.seed)
    else:
        return [_input_from_metadata(metadata, number, job.seed) for number in range(metadata.num_inputs())]
    if len(values) != metadata.num_inputs():
        raise OpforgeError(f"{len(values)} inputs were given, and {job.program} takes {metadata.num_inputs()}")
    return values


def _input_from_metadata(metadata: Any, number: int, seed: int) -> Any:
    try:
        description = metadata.input_tensor_meta(number)
    except RuntimeError:
        raise OpforgeError(f"input {number} of the program is not a tensor; give inputs with --inputs") from None
    dtype = _DTYPES_BY_NUMBER.get(description.dtype())
    if dtype is None:
        raise OpforgeError(
            f"input {number} of the program has dtype number {description.dtype()}; give inputs with --inputs"
        )
    return _make_tensor(TensorSpec(tuple(description.sizes()), dtype), f"{seed}/{number}")


def _inputs_from_text(text: str, seed: int) -> list[Any]:
    """Return inputs from ``((T([2, 3], f32),), {})``, or short ``T([2, 3], f32)``.

    Their contents are seeded.
    """
    full_text = text if text.lstrip().startswith("((") else f"(({text},), {{}})"
    args, kwargs = parse_arguments(full_text)
    if kwargs:
        raise OpforgeError(
            f"inputs of a program have no names, and {text!r} gives {', '.join(kwargs)}; give them in order"
        )
    return flatten([_make_input(value, f"{seed}/{index}") for index, value in enumerate(args)])


def _make_input(value: Any, seed: str) -> Any:
    if isinstance(value, TensorSpec):
        return _make_tensor(value, seed)
    if isinstance(value, list | tuple):
        return [_make_input(item, f"{seed}/{index}") for index, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise OpforgeError(f"a program takes tensors and numbers as inputs, not {value!r}")


def _make_tensor(spec: TensorSpec, seed: str) -> torch.Tensor:
    """Return a contiguous tensor with seeded contents."""
    dense = TensorSpec(spec.shape, spec.dtype, low=spec.low, high=spec.high)
    data = np.ascontiguousarray(seeded_bytes(dense, seed))
    flat = torch.from_numpy(data.copy()).view(torch.uint8)
    if not flat.numel():
        return torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
    return flat.view(TORCH_DTYPES[spec.dtype]).reshape(spec.shape).clone()


def _load_inputs(path: Path) -> list[Any]:
    """Return the tensors of a safetensors file, named 0, 1, … in the order of the inputs."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise OpforgeError(f"{str(path)!r} cannot be read as safetensors: {error}") from None
    names = [str(number) for number in range(len(tensors))]
    if sorted(tensors, key=str) != sorted(names):
        raise OpforgeError(
            f"{str(path)!r} holds {', '.join(sorted(tensors))}; inputs are named {', '.join(names)}, in their order"
        )
    return [tensors[name] for name in names]


def save_tensors(path: Path, values: Sequence[Any]) -> tuple[Any, ...]:
    """Write the tensors among values to a file, named by position.

    Returns the values with None for each tensor.
    """
    tensors = {
        str(n): value.detach().contiguous().clone() for n, value in enumerate(values) if isinstance(value, torch.Tensor)
    }
    save_file(tensors, path)
    return tuple(None if isinstance(value, torch.Tensor) else value for value in values)


def load_values(path: Path, non_tensors: Sequence[Any]) -> list[Any]:
    """Return the values that ``save_tensors`` was given."""
    tensors = load_file(path)
    return [tensors.get(str(number), other) for number, other in enumerate(non_tensors)]


def describe_output(value: Any) -> ProgramOutput:
    if not isinstance(value, torch.Tensor):
        return ProgramOutput(value=value)
    first = tuple(value.reshape(-1)[:6].tolist())
    return ProgramOutput(inputs_text((value,)), tuple(value.shape), _tensor_spec(value).dtype, first)
