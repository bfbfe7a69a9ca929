"""Make calls for an operator from its schema alone, by argument type, to try until some work."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from opforge.check.messages import CallPlan
from opforge.check.operator_call import OperatorCall

MAX_CALLS = 8

# Shapes of the first, second, … tensor; all further tensors get the last shape.
_SHAPES: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((6, 16),),
    ((37,),),
    ((2, 5, 16),),
    ((6, 16), (16,)),
    ((6, 16), (16, 8), (8,)),
    ((6, 16), (8, 16), (8,)),
    ((2, 5, 16), (16,)),
    ((2, 5, 16), (2, 16, 8)),
    ((2, 4, 6, 8),),
    ((2, 4, 6, 8), (4,)),
    ((6, 16), (6,)),
    ((6, 4), (6,), (6,)),
    ((16,), (6, 16)),
    ((),),
    ((32, 32),),
    ((32, 64), (64, 32)),
)
_SIMILAR_SHAPES = ((0, 1, 2, 8, 13), (3, 6), (4, 7))
"""Groups of indices into _SHAPES that differ only in the number of dimensions."""
# Dtypes of the first tensor and of all others.
_DTYPES: tuple[tuple[torch.dtype, torch.dtype], ...] = (
    (torch.float32, torch.float32), (torch.float32, torch.int64), (torch.int64, torch.int64),
    (torch.float32, torch.bool), (torch.float16, torch.float16), (torch.bfloat16, torch.bfloat16),
    (torch.float64, torch.float64), (torch.bool, torch.bool), (torch.float32, torch.int32),
    (torch.int32, torch.int32), (torch.int64, torch.float32), (torch.uint8, torch.uint8), (torch.int8, torch.int8),
    (torch.uint8, torch.float32), (torch.int8, torch.float32), (torch.int32, torch.float32),
)  # fmt: skip
_VALUE_SETS = 3
"""Number of value sets tried for non-tensor arguments."""
_FLOATS = {"eps": 1e-6, "epsilon": 1e-6, "p": 0.5, "alpha": 0.5, "beta": 0.5, "scale": 0.5, "momentum": 0.1}
_INTEGERS = {"blocksize": 64, "block_size": 64, "group_size": 32, "groupsize": 32, "num_heads": 2, "bits": 8}
_DIMENSIONS = {"dim", "axis", "dim0"}


def candidate_plans() -> Iterator[CallPlan]:
    """Yield plans for calls of an operator, the likeliest first."""
    for dtypes, given, numbers in itertools.product(range(len(_DTYPES)), (False, True), range(_VALUE_SETS)):
        for shapes in range(len(_SHAPES)):
            yield CallPlan(shapes, dtypes, numbers, given)


def variations(plan: CallPlan) -> list[CallPlan]:
    """Vary an accepted plan: in shapes of the same kind, dtypes, numbers, optional arguments."""
    # not all shapes: an operator without checks accepts meaningless ones
    similar_shapes = next((kind for kind in _SIMILAR_SHAPES if plan.shapes in kind), ())
    varied = [replace(plan, shapes=shapes) for shapes in similar_shapes if shapes != plan.shapes]
    varied += [replace(plan, given=not plan.given, shapes=s) for s in (plan.shapes, *range(len(_SHAPES))[:7])]
    varied += [replace(plan, dtypes=dtypes) for dtypes in (6, 4, 5) if _DTYPES[plan.dtypes][0].is_floating_point]
    varied += [replace(plan, numbers=numbers) for numbers in range(_VALUE_SETS) if numbers != plan.numbers]
    return varied


def make_call(arguments: list[Any], plan: CallPlan, device: str) -> OperatorCall | None:
    """Make a call from a plan; None if an argument's type is unsupported."""
    maker = _ArgumentMaker(plan, device)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in arguments:
        try:
            value = maker.value(argument)
        except NotImplementedError:
            return None
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return OperatorCall(tuple(args), kwargs)


def unsupported_argument(arguments: list[Any]) -> str:
    """Return the first argument of an unsupported type; empty if there is none."""
    maker = _ArgumentMaker(CallPlan(given=False), "cpu")
    for argument in arguments:
        try:
            maker.value(argument)
        except NotImplementedError:
            return f"{argument.name}: {argument.real_type}"
    return ""


class _ArgumentMaker:
    """Makes the arguments of one call, in order."""

    def __init__(self, plan: CallPlan, device: str) -> None:
        self.plan, self.device = plan, device
        self.generator = torch.Generator().manual_seed(17)
        self.tensor_count = 0

    def value(self, argument: Any) -> Any:
        kind = str(argument.real_type)
        if kind.startswith("Optional["):
            inner = kind.removeprefix("Optional[").removesuffix("]")
            if not self.plan.given:
                return argument.default_value if argument.has_default_value() else None
            return self.value_of_type(inner, argument)
        if argument.has_default_value() and not self.plan.given:
            return argument.default_value
        return self.value_of_type(kind, argument)

    def value_of_type(self, kind: str, argument: Any) -> Any:
        if kind == "Tensor":
            return self.tensor()
        if kind in ("List[Tensor]", "List[Optional[Tensor]]"):
            return [self.tensor(), self.tensor()]
        makers: dict[str, Callable[[Any], Any]] = {
            "int": self.integer, "SymInt": self.integer, "float": self.floating, "number": self.floating,
            "Scalar": self.floating, "bool": self.boolean, "List[int]": self.integers, "List[SymInt]": self.integers,
            "List[float]": lambda _a: [0.5, 0.5], "List[bool]": lambda _a: [True, False],
        }  # fmt: skip
        if kind in makers:
            return makers[kind](argument)
        if argument.has_default_value():
            return argument.default_value
        if kind == "Device":
            return torch.device(self.device)
        if kind == "ScalarType":
            return (torch.float32, torch.int8, torch.bfloat16)[self.plan.numbers]
        if kind == "str":
            return ("none", "sum", "mean")[self.plan.numbers]
        if str(argument.real_type).startswith("Optional["):
            return None
        raise NotImplementedError(kind)

    def integer(self, argument: Any) -> int:
        if argument.name in _DIMENSIONS:
            return (-1, 0, 1)[self.plan.numbers]
        return _INTEGERS.get(argument.name, (1, 2, 16)[self.plan.numbers])

    def floating(self, argument: Any) -> float:
        return _FLOATS.get(argument.name, (0.5, 1.0, 2.0)[self.plan.numbers])

    def boolean(self, argument: Any) -> bool:
        return not argument.default_value if argument.has_default_value() else self.plan.numbers == 1

    def integers(self, argument: Any) -> list[int]:
        size = argument.N or 2
        return [(1, 2, 16)[self.plan.numbers]] * size

    def tensor(self) -> torch.Tensor:
        shapes, dtypes = _SHAPES[self.plan.shapes], _DTYPES[self.plan.dtypes]
        shape = shapes[min(self.tensor_count, len(shapes) - 1)]
        dtype = dtypes[min(self.tensor_count, 1)]
        self.tensor_count += 1
        if dtype.is_floating_point:
            return torch.randn(shape, generator=self.generator).to(dtype).to(self.device)
        # integers may be indices, which must be in range
        high = 2 if dtypes[0].is_floating_point or dtype == torch.bool else 4
        return torch.randint(0, high, shape, generator=self.generator).to(dtype).to(self.device)
