"""Random calls over views, aliases, offsets and numbers: each must be answered as by the kernel in Python, bit for bit.

A pool of calls is made from a few pieces of memory, and plans are learned for them. Then they are called in random
order, while the contents change from round to round. What the kernels answer is computed by calling them directly.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from opforge.runtime.enabling import Enabled
from opforge.runtime.loading import load_function

NUMBERS = (2.0, 3, -0.0, True, float("inf"), 0.1)
_CHUNK = 500
_BITS = {2: torch.int16, 4: torch.int32}


@dataclass(eq=False)
class Call:
    """One call, with the kernel that it is for."""

    operator: Callable[..., Any]
    kernel: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    written: torch.Tensor | None = None
    """Memory that the call writes. It is nobody else's."""
    before: torch.Tensor | None = None
    expected: list[torch.Tensor] = field(default_factory=list)

    def bits(self, function: Callable[..., Any]) -> list[torch.Tensor]:
        """Return the bits of a function's results, or of the memory that it writes."""
        if self.written is not None:
            self.written.copy_(self.before)
            function(*self.args, **self.kwargs)
            return [bits_of(self.written).clone()]
        result = function(*self.args, **self.kwargs)
        return [bits_of(t) for t in (result if isinstance(result, tuple) else (result,))]

    def __str__(self) -> str:
        def text(value: Any) -> str:
            if not isinstance(value, torch.Tensor):
                return repr(value)
            return f"{list(value.shape)} by {value.stride()} at {value.storage_offset()}"

        return f"{self.operator}({', '.join(map(text, self.args))}, {self.kwargs})"


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as integers in a row: NaN equals NaN, and 0 is not -0."""
    return tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])


class RandomCalls:
    """A pool of random calls of kernels in a folder."""

    def __init__(
        self, root: Path, ops: Sequence[str], *, seed: int, size: int, device: str, dtype: torch.dtype
    ) -> None:
        self.seed = seed
        self._random = random.Random(seed)
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(seed)
        self._memories = [self._memory(8192) for _ in range(3)]  # more than the largest view reaches
        self._kernels = {
            op: load_function(root / op / f"{op}_implementation_1.py", [f"{op}_kernel_impl"]) for op in ops
        }
        makers = {op: maker for op, maker in self._makers().items() if op in ops}
        self.calls: list[Call] = []
        while len(self.calls) < size:
            op = self._random.choice(list(makers))
            call = makers[op](op)
            try:
                call.bits(call.kernel)
            except NotImplementedError:  # the kernel is not for such tensors
                continue
            self.calls.append(call)

    def learn(self, made: Enabled) -> list[str]:
        """Learn plans, and keep the calls that have one; return the others."""
        for call in self.calls:
            call.bits(call.operator)
        made.learn()
        without = [call for call in self.calls if not self._is_replayed(call, made)]
        self.calls = [call for call in self.calls if call not in without]
        return list(map(str, without))

    def run(self, count: int, rounds: int) -> str:
        """Call in random order, with other contents in every round; return a description of what is wrong."""
        for number in range(rounds):
            self._fill()
            for call in self.calls:
                call.expected = [bits.clone() for bits in call.bits(call.kernel)]
            for chunk in self._chunks(count * (number + 1) // rounds - count * number // rounds):
                results = [bits for call in chunk for bits in call.bits(call.operator)]
                if not torch.equal(torch.cat(results), torch.cat([bits for call in chunk for bits in call.expected])):
                    return f"seed {self.seed}, round {number}: {self._first_wrong(chunk, results)}"
        return ""

    def _chunks(self, count: int) -> Iterator[list[Call]]:
        while count > 0:
            yield self._random.choices(self.calls, k=min(count, _CHUNK))
            count -= _CHUNK

    @staticmethod
    def _first_wrong(chunk: Sequence[Call], results: Sequence[torch.Tensor]) -> str:
        results = list(results)
        for call in chunk:
            for expected in call.expected:
                if not torch.equal(result := results.pop(0), expected):
                    return f"{call} gave {result.tolist()}, the kernel in Python {expected.tolist()}"
        return "the results are equal now"

    @staticmethod
    def _is_replayed(call: Call, made: Enabled) -> bool:
        before = replayed(made)
        call.bits(call.operator)
        return replayed(made) == before + 1

    def _memory(self, elements: int) -> torch.Tensor:
        return torch.zeros(elements, dtype=self._dtype, device=self._device)

    def _fill(self) -> None:
        """Fill all memory with random bits, NaN and infinity among them, or with ordinary numbers."""
        for memory in [*self._memories, *(call.before for call in self.calls if call.before is not None)]:
            if self._random.random() < 0.3:
                bits = memory.view(_BITS[memory.element_size()])
                bits.random_(torch.iinfo(bits.dtype).min, torch.iinfo(bits.dtype).max, generator=self._generator)
            else:
                memory.normal_(generator=self._generator)

    def _view(self, memory: torch.Tensor, sizes: Sequence[int], *, gaps: bool = True) -> torch.Tensor:
        """Return a random view with these sizes: at some offset, with steps or with equal rows."""
        strides, step = [], self._random.choice((1, 1, 1, 2, 3)) if gaps else 1
        for size in reversed(sizes):
            strides.insert(0, step)
            step *= size
        if gaps and self._random.random() < 0.1:
            strides[self._random.randrange(len(sizes))] = 0
        elif gaps and len(sizes) > 1 and self._random.random() < 0.2:
            sizes, strides = sizes[::-1], strides[::-1]
        last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        offset = self._random.choice((0, 0, 1, 2, 3, 4, 8, 16, self._random.randrange(64)))
        return memory.as_strided(sizes, strides, min(offset, memory.numel() - last - 1))

    def _sizes(self) -> list[int]:
        first = self._random.choice((1, 2, 3, 16, 17, 63, 64, 65, self._random.randrange(1, 200)))
        return [first] if self._random.random() < 0.5 else [first, self._random.randrange(1, 9)]

    def _makers(self) -> Mapping[str, Callable[[str], Call]]:
        aten, pick = torch.ops.aten, self._random.choice
        unary = {
            "neg": aten.neg.default, "relu": aten.relu.default, "gelu": aten.gelu.default, "silu": aten.silu.default,
            "sigmoid": aten.sigmoid.default,
        }  # fmt: skip
        return {
            **{op: lambda op, o=operator: self._call(o, op, self._tensor()) for op, operator in unary.items()},
            "mul": lambda op: self._call(aten.mul.Tensor, op, self._tensor(), pick(NUMBERS)),
            "clamp": lambda op: self._call(
                aten.clamp.default, op, self._tensor(), pick((None, -1, -0.5, 0)), pick((None, 1, 1.5, 2.0))
            ),
            "add": self._sum,
            "add_": self._sum_in_place,
            "_softmax": lambda op: self._call(aten._softmax.default, op, self._tensor(), -1, False),
            "native_layer_norm": self._layer_norm,
        }

    def _call(self, operator: Callable[..., Any], op: str, *args: Any, **kwargs: Any) -> Call:
        return Call(operator, self._kernels[op], args, kwargs)

    def _tensor(self) -> torch.Tensor:
        return self._view(self._random.choice(self._memories), self._sizes(), gaps=self._random.random() < 0.3)

    def _sum(self, op: str) -> Call:
        sizes = self._sizes()[:1]
        one, other = (self._view(self._random.choice(self._memories), sizes) for _ in range(2))
        return self._call(torch.ops.aten.add.Tensor, op, one, self._random.choice((one, other, other, other)))

    def _sum_in_place(self, op: str) -> Call:
        sizes = self._sizes()[:1]
        written = self._memory(1024)
        target, near, far = (self._view(memory, sizes) for memory in (written, written, self._memories[0]))
        alpha = self._random.choice(({}, {"alpha": 2}, {"alpha": 0.5}, {"alpha": True}))
        call = self._call(torch.ops.aten.add_.Tensor, op, target, self._random.choice((near, far)), **alpha)
        call.written, call.before = written, torch.zeros_like(written)
        return call

    def _layer_norm(self, op: str) -> Call:
        rows, columns = self._random.randrange(1, 9), self._random.randrange(1, 200)
        given = self._view(self._random.choice(self._memories), [rows, columns], gaps=False)
        parts = [self._random.choice((None, self._view(self._memories[i], [columns], gaps=False))) for i in range(2)]
        eps = self._random.choice((1e-5, 1e-6, 0.0))
        return self._call(torch.ops.aten.native_layer_norm.default, op, given, [columns], *parts, eps)


def replayed(made: Enabled) -> int:
    """Return how many calls were replayed."""
    return sum(int(row.get("replayed", 0)) for row in made.counters().values())
