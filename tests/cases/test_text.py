from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opforge.cases.text import LogEntry, format_arguments, format_log, parse_arguments, parse_log
from opforge.cases.values import (
    DTYPES,
    LAYOUTS,
    MEMORY_FORMATS,
    Device,
    Dtype,
    Layout,
    MemoryFormat,
    TensorSpec,
    parse_dtype,
)
from opforge.errors import CaseSyntaxError, UnknownNameError


@st.composite
def tensors(draw):
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=5)))
    stride = draw(st.none() | st.tuples(*[st.integers(0, 99)] * len(shape)))
    device = draw(st.none() | st.sampled_from(["cpu", "cuda:0"]))
    plain = TensorSpec(shape, draw(st.sampled_from(sorted(DTYPES))), stride, draw(st.integers(0, 50)), device)
    at = draw(st.none() | st.integers(0, 10**9))
    nbytes = draw(st.none() | st.just(plain.storage_nbytes + 64))
    low = draw(st.none() | st.integers(-9, 9))
    return TensorSpec(
        plain.shape, plain.dtype, stride, plain.offset, device, at, nbytes, low, None if low is None else low + 3.5
    )


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.sampled_from([Dtype(d) for d in DTYPES])
    | st.sampled_from([Layout(name) for name in LAYOUTS])
    | st.sampled_from([MemoryFormat(m) for m in MEMORY_FORMATS])
    | st.sampled_from([Device("cpu"), Device("cuda:3")])
    | tensors()
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple), max_leaves=8
)


def same(left, right):
    if isinstance(left, float) and math.isnan(left):
        return isinstance(right, float) and math.isnan(right)
    if isinstance(left, complex):
        return isinstance(right, complex) and same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


@settings(deadline=None, max_examples=300)
@given(st.lists(values, max_size=4), st.dictionaries(st.text(), values, max_size=3))
def test_arguments_round_trip(args, kwargs):
    text = format_arguments(args, kwargs)
    parsed_args, parsed_kwargs = parse_arguments(text)
    assert same(tuple(args), parsed_args)
    assert list(kwargs) == list(parsed_kwargs)
    assert all(same(kwargs[name], parsed_kwargs[name]) for name in kwargs)
    assert format_arguments(parsed_args, parsed_kwargs) == text


def test_a_line_of_an_operator_input_log():
    args, kwargs = parse_arguments("((T([2, 512], f16, stride=(1, 2)), 1.0), {'dim': -1})")
    assert args == (TensorSpec((2, 512), "f16", (1, 2)), 1.0)
    assert kwargs == {"dim": -1}


def test_other_spellings_are_read():
    text = "((T([], torch.float16), (1+2j), -inf, device(type='cuda', index=0), torch.device('cpu')), {'dtype': f32})"
    args, kwargs = parse_arguments(text)
    assert args == (TensorSpec((), "f16"), 1 + 2j, -math.inf, Device("cuda:0"), Device("cpu"))
    assert kwargs == {"dtype": Dtype("f32")}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "((1,)",
        "1",
        "((1,), {}, {})",
        "((__import__('os').system('true'),), {})",
        "((T([2], f99),), {})",
        "((T([2, -1], f32),), {})",
        "((T([2], f32, stride=(1, 1)),), {})",
        "((T([4], f32, nbytes=8),), {})",
        "((T([2], f32, colour=1),), {})",
        "((1 + 1,), {})",
        "(([x for x in (1, 2)],), {})",
        "((1,), {1: 2})",
        "((b'bytes',), {})",
        "([1], {})",
        "((" + "(" * 500 + ")" * 500 + ",), {})",
    ],
)
def test_what_is_not_a_case_is_refused(text):
    with pytest.raises(CaseSyntaxError):
        parse_arguments(text)


def test_nothing_in_the_text_is_evaluated(tmp_path):
    mark = tmp_path / "mark"
    with pytest.raises(CaseSyntaxError):
        parse_arguments(f"((open({str(mark)!r}, 'w'),), {{}})")
    assert not mark.exists()


def test_log_with_counts_round_trips_and_bad_lines_are_named():
    lines = [
        "Operator: aten.add.Tensor",
        "cnt: 3, ((T([2], f16), T([2], f16)), {})",
        "cnt: x, ((1,), {})",
        "",
        "Operator: aten.relu.default",
        "cnt: 1, ((T([2], nope),), {})",
        "cnt: 12, ((T([2], bf16),), {})",
    ]
    read = list(parse_log(lines))
    entries = [e for e in read if isinstance(e, LogEntry)]
    errors = [str(e) for e in read if isinstance(e, CaseSyntaxError)]
    assert [(e.op, e.count) for e in entries] == [("aten.add.Tensor", 3), ("aten.relu.default", 12)]
    assert [e.partition(":")[0] for e in errors] == ["line 3", "line 6"]
    assert list(parse_log(format_log(entries))) == entries


def test_short_dtype_names_are_pytorchs_own():
    from torch.utils._dtype_abbrs import dtype_abbrs

    from opforge.cases.wire import SHORT_DTYPES

    assert {short for dtype, short in SHORT_DTYPES.items() if dtype_abbrs.get(dtype, short) != short} == set()


def test_dtypes_as_people_type_them():
    assert [parse_dtype(d) for d in ("bf16", "torch.bfloat16", "bool", "float", "int64")] == [
        "bf16",
        "bf16",
        "b8",
        "f32",
        "i64",
    ]
    with pytest.raises(UnknownNameError, match="bf16"):
        parse_dtype("bf17")
