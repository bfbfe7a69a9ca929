"""The calls on which honest kernels are judged: every dtype, hostile layouts, and contents that break careless code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

Call = tuple[list[Any], dict[str, Any]]
REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WIDE = (torch.float64, torch.float32)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
EVERY = (*REAL, *COMPLEX, *INTEGERS, torch.bool)
DRAW: ContextVar[int] = ContextVar("DRAW", default=0)
"""Which draw of all contents: another one for each repeat."""


def contents(kind: str, dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Return this many numbers: ``usual``, ``nan``, ``odd`` (NaN and infinities), ``extreme`` (finite), ``special`` (all of it), ``equal`` (duplicates)."""
    generator = torch.Generator().manual_seed(seed + 100_000 * DRAW.get())
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if dtype.is_complex:
        part = torch.float32 if dtype == torch.complex64 else torch.float64
        return torch.complex(*(contents(kind, part, count, seed + i) for i in (0, 1)))
    if not dtype.is_floating_point:
        return _integers(kind, dtype, count, generator)
    drawn = torch.randn(count, generator=generator, dtype=torch.float64)
    if kind == "equal":
        drawn = torch.round(drawn)
    if kind in ("nan", "odd", "extreme", "special") and count:
        info = torch.finfo(dtype)
        odd = [0.0, -0.0, info.tiny, -info.tiny, info.tiny / 4, info.eps, 1.0]
        odd += [] if kind == "extreme" else [math.nan]
        odd += [math.inf, -math.inf] if kind in ("odd", "special") else []
        odd += [info.max, info.min] if kind in ("extreme", "special") else []
        places = torch.randperm(count, generator=generator)[: max(1, count // 2)]
        picks = torch.randint(0, len(odd), (len(places),), generator=generator)
        drawn[places] = torch.tensor(odd, dtype=torch.float64)[picks]
    return drawn.to(dtype)


def _integers(kind: str, dtype: torch.dtype, count: int, generator: torch.Generator) -> torch.Tensor:
    info = torch.iinfo(dtype)
    low = 0 if dtype == torch.uint8 else -9
    drawn = torch.randint(low, 10, (count,), generator=generator, dtype=dtype)
    if kind in ("odd", "special", "extreme") and count:
        places = torch.randperm(count, generator=generator)[: max(1, count // 2)]
        odd = torch.tensor([info.min, info.max, 0, 1, info.max - 1], dtype=dtype)
        drawn[places] = odd[torch.randint(0, len(odd), (len(places),), generator=generator)]
    return drawn


def tensor(
    dtype: torch.dtype, shape: tuple[int, ...], kind: str = "usual", layout: str = "dense", seed: int = 0
) -> torch.Tensor:
    """Return a tensor with its contents laid out in memory in one of several ways."""

    def made(*sizes: int) -> torch.Tensor:
        return contents(kind, dtype, math.prod(sizes), seed).reshape(sizes)

    match layout:
        case "dense":
            return made(*shape)
        case "transposed":
            return made(*reversed(shape)).permute(*reversed(range(len(shape))))
        case "strided":
            return made(*shape[:-1], 2 * shape[-1])[..., ::2]
        case "offset":
            return made(math.prod(shape) + 3)[3:].reshape(shape)
        case "expanded":
            return made(1, *shape[1:]).expand(shape)
        case "channels_last":
            return made(*shape).contiguous(memory_format=torch.channels_last)
    raise ValueError(layout)


HOSTILE: tuple[tuple[tuple[int, ...], str, str], ...] = (
    ((5, 7), "usual", "dense"),
    ((5, 7), "special", "transposed"),
    ((3, 8), "extreme", "strided"),
    ((7,), "special", "offset"),
    ((4, 6), "usual", "expanded"),
    ((2, 3, 4, 5), "special", "channels_last"),
    ((33,), "equal", "dense"),
    ((0, 3), "usual", "dense"),
    ((), "special", "dense"),
)
"""Shape, contents and layout of the inputs of elementwise operators."""
TAME = tuple((s, {"extreme": "usual", "special": "odd"}.get(k, k), layout) for s, k, layout in HOSTILE)
"""The same without extremes, for operators in which the order of the steps decides whether they overflow on the way."""


def unary(*dtypes: torch.dtype, finite: bool = False, **kwargs: Any) -> Iterator[Call]:
    for number, dtype in enumerate(dtypes):
        for seed, (shape, kind, layout) in enumerate(HOSTILE):
            chosen = {"special": "nan", "extreme": "usual"}.get(kind, kind) if finite else kind
            yield [tensor(dtype, shape, chosen, layout, 100 * number + seed)], kwargs


def binary(*dtypes: torch.dtype, scales: tuple[Any, ...] = ()) -> Iterator[Call]:
    for number, dtype in enumerate(dtypes):
        for seed, (shape, kind, layout) in enumerate(HOSTILE):
            left = tensor(dtype, shape, kind, layout, 100 * number + seed)
            yield [left, tensor(dtype, shape, kind, "dense", 100 * number + seed + 50)], {}
        column, row = tensor(dtype, (4, 1), "special", "dense", 7), tensor(dtype, (3, 1, 5), "usual", "dense", 8)
        yield [column, row], {}
    yield [tensor(torch.int32, (3, 4)), tensor(torch.float32, (4,), "special")], {}
    yield [tensor(torch.float64, ()), tensor(torch.float16, (3,))], {}
    yield [tensor(torch.bool, (3, 4)), tensor(torch.uint8, (4,))], {}
    for scale in scales:
        yield [tensor(torch.float32, (3, 4)), tensor(torch.float32, (3, 4), "special", seed=2)], {"alpha": scale}


def along(*dtypes: torch.dtype, tail: tuple[Any, ...] = (), named: bool = False, **kwargs: Any) -> Iterator[Call]:
    """Calls that take one dimension, which is tried first, last and counted from the end."""
    for number, dtype in enumerate(dtypes):
        for seed, (shape, kind, layout) in enumerate(TAME):
            for dim in {0, -1} if len(shape) > 1 else {0}:
                x = tensor(dtype, shape, kind, layout, 100 * number + seed)
                yield ([x], {"dim": dim, **kwargs}) if named else ([x, dim, *tail], kwargs)


def reduced(*dtypes: torch.dtype, extreme: bool = False, empty: bool = True, **kwargs: Any) -> Iterator[Call]:
    """Calls that take a list of dimensions."""
    for number, dtype in enumerate(dtypes):
        for seed, (shape, kind, layout) in enumerate(HOSTILE if extreme else TAME):
            x = tensor(dtype, shape, kind, layout, 100 * number + seed)
            if x.numel() or empty:
                yield [x, [0], True], kwargs
            if x.dim() > 1:
                yield [x, [-1]], kwargs
                if x.numel() or empty:
                    yield [x, [0, 1]], kwargs
            elif x.numel():
                yield [x, []], kwargs


def whole(*dtypes: torch.dtype) -> Iterator[Call]:
    for number, dtype in enumerate(dtypes):
        for seed, (shape, kind, layout) in enumerate(TAME):
            yield [tensor(dtype, shape, kind, layout, 100 * number + seed)], {}
    yield (
        [
            tensor(torch.float16, (300,)),
        ],
        {"dtype": torch.float32},
    )
    yield [tensor(torch.int8, (300,), "extreme")], {"dtype": torch.int32}
    yield [tensor(torch.bfloat16, (3000,))], {}
    yield [tensor(torch.float32, (4099,))], {}


def variances() -> Iterator[Call]:
    for args, kwargs in reduced(*REAL, *COMPLEX, empty=False):
        keep = {"keepdim": True} if len(args) > 2 else {}
        yield args[:2], {**kwargs, **keep, "correction": 1}
    yield [tensor(torch.float32, (6, 5))], {"correction": 0}
    yield [tensor(torch.float32, (6, 5)) + 1000], {}
    yield [tensor(torch.float64, (6, 5)), [1]], {"correction": 2}


def matrices(*dtypes: torch.dtype, batch: tuple[int, ...] = ()) -> Iterator[Call]:
    shapes = [(5, 7, 3), (1, 9, 1), (8, 8, 8), (3, 0, 4), (0, 3, 2), (17, 20, 6)]
    for number, dtype in enumerate(dtypes):
        for seed, (rows, inner, columns) in enumerate(shapes):
            left = tensor(dtype, (*batch, rows, inner), "usual", "dense", 100 * number + seed)
            right = tensor(dtype, (*batch, columns, inner), "usual", "dense", 100 * number + seed + 50).mT
            yield [left, right], {}
        yield [tensor(dtype, (*batch, 4, 6), "odd"), tensor(dtype, (*batch, 6, 5), seed=3)], {}
        yield (
            [tensor(dtype, (*batch, 4, 6), layout="strided"), tensor(dtype, (*batch, 6, 5), layout="offset", seed=3)],
            {},
        )
        yield [tensor(dtype, (*batch, 6, 6), layout="expanded"), tensor(dtype, (*batch, 6, 6), seed=4)], {}


def added() -> Iterator[Call]:
    for args, _ in matrices(*REAL, *COMPLEX, torch.int64, torch.int16):
        dtype, shape = args[0].dtype, (args[0].shape[0], args[1].shape[1])
        yield [tensor(dtype, shape, seed=9), *args], {}
        yield [tensor(dtype, shape[1:], seed=9), *args], {"beta": 2, "alpha": 3}
    yield (
        [tensor(torch.float32, (4, 5), "special"), tensor(torch.float32, (4, 6)), tensor(torch.float32, (6, 5))],
        {"beta": 0},
    )


def convolutions(*dtypes: torch.dtype) -> Iterator[Call]:
    for number, dtype in enumerate(dtypes):
        s = 100 * number
        image, weight, bias = (
            tensor(dtype, (2, 4, 7, 6), seed=s),
            tensor(dtype, (6, 4, 3, 2), seed=s + 1),
            tensor(dtype, (6,), seed=s + 2),
        )
        plain = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        yield [image, weight, bias, *plain], {}
        yield [image, weight, None, [2, 1], [1, 2], [1, 2], False, [0, 0], 1], {}
        yield [image, tensor(dtype, (6, 2, 3, 3), seed=s + 3), bias, [1, 1], [1, 1], [1, 1], False, [0, 0], 2], {}
        yield [tensor(dtype, (2, 4, 7, 6), "usual", "channels_last", s + 4), weight, bias, *plain], {}
        yield (
            [
                tensor(dtype, (2, 4, 9), seed=s + 5),
                tensor(dtype, (3, 4, 3), seed=s + 6),
                None,
                [2],
                [1],
                [1],
                False,
                [0],
                1,
            ],
            {},
        )
        yield [image, tensor(dtype, (4, 3, 3, 2), seed=s + 7), None, [2, 1], [1, 0], [1, 1], True, [1, 0], 1], {}
        yield [image, tensor(dtype, (4, 3, 3, 2), seed=s + 8), bias, [1, 2], [0, 1], [2, 1], True, [0, 1], 2], {}


def transforms() -> Iterator[Call]:
    for number, dtype in enumerate(COMPLEX):
        for seed, (shape, dims) in enumerate(
            (((8,), [0]), ((3, 12), [1]), ((4, 5), [0, 1]), ((2, 16), [1]), ((7,), [0]), ((6, 4), [0]))
        ):
            for normalization in (0, 1, 2):
                x = tensor(dtype, shape, layout="transposed", seed=10 * number + seed)
                yield [x, dims, normalization, normalization != 2], {}


def triangles() -> Iterator[Call]:
    for dtype in (*WIDE, *COMPLEX):
        a = tensor(dtype, (2, 5, 5), seed=1) * 0.3 + 2 * torch.eye(5, dtype=dtype)
        b = tensor(dtype, (5, 3), seed=2)
        yield [a.triu(), b], {"upper": True}
        yield [a.tril(), b.expand(2, 5, 3)], {"upper": False}
        yield [a.triu().mT, b], {"upper": False, "unitriangular": True}
        yield [a[0].tril(), b.mT], {"upper": False, "left": False}


def squares() -> Iterator[Call]:
    for dtype in (*WIDE, *COMPLEX):
        yield [tensor(dtype, (6, 6), seed=1) + 3 * torch.eye(6, dtype=dtype)], {}
        yield [(tensor(dtype, (2, 4, 4), seed=2) + 3 * torch.eye(4, dtype=dtype)).mT], {}
        yield [tensor(dtype, (0, 3, 3))], {}


def norms() -> Iterator[Call]:
    for number, dtype in enumerate(REAL):
        for seed, (shape, kind, layout) in enumerate(
            (((4, 8), "usual", "dense"), ((3, 5), "odd", "transposed"), ((2, 3, 6), "equal", "strided"))
        ):
            x, weight = tensor(dtype, shape, kind, layout, 10 * number + seed), tensor(dtype, shape[-1:], seed=5)
            yield [x, list(shape[-1:]), weight, tensor(dtype, shape[-1:], seed=6), 1e-5], {}
            yield [x, list(shape[-1:]), None, None, 1e-5], {}
            yield [x + 100, list(shape), None, None, 1e-3], {}


def joined() -> Iterator[Call]:
    for dtype in (*EVERY, *FLOAT8):
        base = torch.float32 if dtype in FLOAT8 else dtype
        made = [
            tensor(base, s, "special", layout, i).to(dtype)
            for i, (s, layout) in enumerate((((2, 3), "dense"), ((4, 3), "transposed"), ((1, 3), "strided")))
        ]
        yield [made], {}
        yield [[made[0].t(), made[1].t()], 1], {}
        yield [[made[0]]], {}
    yield [[tensor(torch.int32, (2, 3)), tensor(torch.float16, (2, 3))], -1], {}
    yield [[torch.empty(0), tensor(torch.float32, (2, 3))]], {}


def flipped() -> Iterator[Call]:
    for number, dtype in enumerate(EVERY):
        for seed, (shape, kind, layout) in enumerate(HOSTILE):
            x = tensor(dtype, shape, kind, layout, 100 * number + seed)
            yield [x, [0]], {}
            if len(shape) > 1:
                yield [x, [0, -1]], {}


def sorted_lines() -> Iterator[Call]:
    for dtype in (*REAL, *INTEGERS, torch.bool):
        for number, (args, kwargs) in enumerate(along(dtype, named=True, stable=True)):
            if args[0].dim() < 4:
                yield args, {**kwargs, "descending": number % 2 == 1}


def lower_triangles() -> Iterator[Call]:
    for dtype in EVERY:
        for shape, layout in (
            ((4, 5), "dense"),
            ((5, 4), "transposed"),
            ((2, 3, 3), "strided"),
            ((3, 4), "expanded"),
            ((0, 3), "dense"),
        ):
            yield [tensor(dtype, shape, "special", layout)], {}
            yield [tensor(dtype, shape, "special", layout), -1], {}


CALLS: dict[str, Callable[[], Iterator[Call]]] = {
    "relu.default": lambda: unary(*REAL, *INTEGERS),
    "exp.default": lambda: unary(*REAL, torch.int64, torch.uint8, torch.bool),
    "erf.default": lambda: unary(*REAL, torch.int32, torch.bool),
    "tanh.default": lambda: unary(*REAL, torch.int8, torch.bool),
    "sigmoid.default": lambda: unary(*REAL, torch.int16, torch.bool),
    # ATen's own gelu of an infinity, or of the largest number, depends on the layout: inf in one, NaN in another
    "gelu.default": lambda: (c for a in ("none", "tanh") for c in unary(*REAL, finite=True, approximate=a)),
    "silu.default": lambda: unary(*REAL),
    "abs.default": lambda: unary(*REAL, *COMPLEX, *INTEGERS),
    "rsqrt.default": lambda: unary(*REAL, torch.int64),
    "add.Tensor": lambda: binary(*EVERY, scales=(2, -0.5)),
    "mul.Tensor": lambda: binary(*EVERY),
    "maximum.default": lambda: binary(*REAL, *INTEGERS, torch.bool),
    "bitwise_xor.Tensor": lambda: (
        c for c in binary(*INTEGERS, torch.bool) if not any(t.is_floating_point() for t in c[0])
    ),
    "sum.default": lambda: whole(*EVERY),
    "sum.dim_IntList": lambda: reduced(*EVERY),
    "mean.dim": lambda: reduced(*REAL, *COMPLEX),
    "var.correction": variances,
    "amax.default": lambda: reduced(*REAL, *INTEGERS, torch.bool, extreme=True, empty=False),
    "cumsum.default": lambda: along(*EVERY),
    "_softmax.default": lambda: along(*REAL, tail=(False,)),
    "_log_softmax.default": lambda: along(*REAL, tail=(False,)),
    "sort.stable": sorted_lines,
    "mm.default": lambda: matrices(*REAL, *COMPLEX, *INTEGERS),
    "bmm.default": lambda: matrices(*REAL, *COMPLEX, torch.int32, batch=(2,)),
    "addmm.default": added,
    "convolution.default": lambda: convolutions(*REAL),
    "_fft_c2c.default": transforms,
    "linalg_solve_triangular.default": triangles,
    "linalg_inv_ex.default": squares,
    "native_layer_norm.default": norms,
    "cat.default": joined,
    "flip.default": flipped,
    "tril.default": lower_triangles,
}
"""By operator."""
