"""The operator under check: its schema, its registrations and its calls."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
from torch._library.custom_ops import OPDEFS

from opforge.check.differences import first_difference
from opforge.check.operator_call import OperatorCall, flat_results, resized
from opforge.frames import is_user_file
from opforge.sandbox.guest.global_state import seed_generator

BACKENDS = ("CPU", "CUDA", "XPU", "MPS", "HPU", "PrivateUse1")
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_ALL_DEVICE_KEYS = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")


@dataclass
class Subject:
    """One operator with the calls it accepts."""

    name: str
    """Name such as ``ns::op`` or ``ns::op.overload``."""
    overload: Any
    calls: list[OperatorCall] = field(default_factory=list)
    reference: Callable[..., Any] | None = None
    functions: list[Callable[..., Any]] = field(default_factory=list)
    """Public Python functions with the same name."""
    device: str = "cpu"
    interpreted: bool = False
    """Whether Triton kernels run in the interpreter."""
    backward_calls: set[str] = field(default_factory=set)
    """Operators that its backward called, as far as it was run."""
    last_error: BaseException | None = None
    """Last error raised by the operator."""
    before_call: Callable[[OperatorCall], None] = lambda _call: None
    """Callback before every call, to identify a call that kills the process."""

    @property
    def arguments(self) -> list[Any]:
        return list(self.overload._schema.arguments)  # noqa: SLF001  # torch has no public name for it

    @property
    def returns(self) -> list[Any]:
        return list(self.overload._schema.returns)  # noqa: SLF001

    @property
    def base_name(self) -> str:
        """The name without namespace and overload."""
        return self.name.partition("::")[2].partition(".")[0]

    @property
    def definition(self) -> Any:
        """The definition, if made by ``torch.library.custom_op`` or ``triton_op``; else None."""
        return OPDEFS.get(self.name)

    @property
    def written_arguments(self) -> frozenset[str]:
        """Arguments that the schema marks as written to."""
        return frozenset(a.name for a in self.arguments if a.alias_info is not None and a.alias_info.is_write)

    @property
    def mutates(self) -> bool:
        return bool(self.written_arguments)

    @property
    def is_tagged_random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.overload.tags

    def has_kernel(self, key: str) -> bool:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(self.name, key))  # noqa: SLF001

    @property
    def is_composite(self) -> bool:
        """Whether it is composed of other operators, which provide gradients and fakes."""
        return self.has_kernel("CompositeImplicitAutograd")

    def backends(self) -> list[str]:
        """Return the devices with their own kernels; ``all`` means one kernel for every device."""
        keys = [key for key in BACKENDS if self.has_kernel(key)]
        if self.definition is not None and None not in self.definition._backend_fns:  # noqa: SLF001
            return keys or [str(device).upper() for device in self.definition._backend_fns]  # noqa: SLF001
        return [*keys, "all"] if any(self.has_kernel(key) for key in _ALL_DEVICE_KEYS) else keys

    def arguments_by_name(self, call: OperatorCall) -> dict[str, Any]:
        """Return a call's arguments by name."""
        names = [a.name for a in self.arguments if not a.kwarg_only]
        return dict(zip(names, call.args, strict=False)) | dict(call.kwargs)

    def written_tensors(self, call: OperatorCall) -> list[torch.Tensor]:
        """Return the tensors of a call that the schema allows the operator to write to."""
        values = [value for name, value in self.arguments_by_name(call).items() if name in self.written_arguments]
        return [t for value in values for t in flat_results(value) if isinstance(t, torch.Tensor)]

    def written_indices(self, call: OperatorCall) -> frozenset[int]:
        """Return the indices of the written tensors among a call's tensors."""
        written_ids = {id(t) for t in self.written_tensors(call)}
        return frozenset(place for place, t in enumerate(call.tensors) if id(t) in written_ids)

    def results(self, call: OperatorCall) -> list[Any]:
        """Call the operator and return its results."""
        self.before_call(call)
        try:
            return flat_results(self.overload(*call.args, **call.kwargs))
        except Exception as error:  # the operator may raise anything; it is raised again
            self.last_error = error
            raise

    def run(self, call: OperatorCall, seed: int = 0) -> list[Any]:
        """Call the operator on the call's own tensors; return results, then written tensors."""
        seed_generator(seed, torch.device(self.device))
        return [*self.results(call), *self.written_tensors(call)]

    def run_copy(self, call: OperatorCall, seed: int = 0) -> list[Any]:
        """Run a copy of a call, outside autograd."""
        with torch.no_grad():
            return self.run(call.copy(), seed)

    def accepts(self, call: OperatorCall) -> bool:
        """Whether the operator runs a call without an error."""
        return not isinstance(attempt(self.run_copy, call), Exception)

    def floating_tensors(self, call: OperatorCall) -> list[torch.Tensor]:
        return [t for t in call.tensors if t.is_floating_point()]

    def calls_with_dtypes(self, *dtypes: torch.dtype) -> list[OperatorCall]:
        """Return the calls with floating-point tensors of these dtypes only, else all calls."""
        chosen = [c for c in self.calls if all(t.dtype in dtypes for t in self.floating_tensors(c))]
        return chosen or self.calls

    @property
    def fixed_sizes(self) -> frozenset[int]:
        """Sizes to keep: those of tensors with a constant shape, such as tables, if others vary."""
        shapes = [[tuple(t.shape) for t in call.tensors] for call in self.calls]
        if len({len(call_shapes) for call_shapes in shapes}) != 1:
            return frozenset()
        columns = list(zip(*shapes, strict=True))
        constant = [column[0] for column in columns if len(set(column)) == 1]
        return frozenset(size for shape in constant for size in shape) if len(constant) < len(columns) else frozenset()

    def variable_sizes(self, call: OperatorCall) -> list[int]:
        """Return the distinct changeable sizes of a call's tensors."""
        return sorted({size for t in call.tensors for size in t.shape if size > 1} - self.fixed_sizes)

    def resized(self, call: OperatorCall, new_size: Callable[[int], int]) -> OperatorCall:
        """Return the call with other sizes; equal sizes stay equal, contents stay similar."""
        pinned = self.fixed_sizes
        return resized(call, lambda size: size if size < 2 or size in pinned else new_size(size))

    def is_random(self) -> bool:
        """Whether the result depends on the seed."""
        calls = self.calls_with_dtypes(torch.float32)[:3]
        return any(first_difference(self.run_copy(call, 0), self.run_copy(call, 1)) for call in calls)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that a check reports once, however many calls show it."""

    kind: str
    what: str
    fix: str = ""


def public_functions(base: str, package: str) -> list[Callable[..., Any]]:
    """Return the functions with an operator's name in a package's modules; users call these."""
    functions: dict[int, Callable[..., Any]] = {}
    for name, module in list(sys.modules.items()):
        if not package or not (name == package or name.startswith(f"{package}.")):
            continue
        value = getattr(module, "__dict__", {}).get(base)
        if isinstance(value, FunctionType) and value.__module__.partition(".")[0] == package.partition(".")[0]:
            functions[id(value)] = value
    return list(functions.values())


def attempt(
    function: Callable[_Parameters, _Result], *args: _Parameters.args, **kwargs: _Parameters.kwargs
) -> _Result | Exception:
    """Call code of the user's (operator, fake, formula, rule); return its result or its error."""
    try:
        return function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  # such code may raise anything
        return error


def printable(text: str) -> str:
    """Return a text as one line, with unprintable characters replaced."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def describe_error(error: BaseException, max_chars: int = 300) -> str:
    """Return an error's type, the beginning of its message, and the line of the user's code that raised it."""
    text = printable(str(error))
    return f"{type(error).__name__}: {text[:max_chars]}{'…' if len(text) > max_chars else ''}{user_location(error)}"


def user_location(error: BaseException) -> str:
    """Return the last line of the user's code in an error's traceback; empty if there is none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_user_file(f.filename)]
    code = f" (`{printable(frames[-1].line)}`)" if frames and frames[-1].line else ""
    return f" at {frames[-1].filename}:{frames[-1].lineno}{code}" if frames else ""
