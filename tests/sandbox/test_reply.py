"""What a worker replies is parsed into fields of known types, or refused, whatever a kernel has written."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opforge.sandbox.host.reply import (
    MALFORMED_REPLY,
    AllocateReply,
    CallReply,
    CallsReply,
    EstimateReply,
    HostAllocateReply,
    InputTestsReply,
    IntegrityReply,
    LoadReply,
    MalformedReplyError,
    ReportedObject,
    ReportedTensor,
    ResultReply,
    fault,
    is_time,
    locations,
    raised_text,
    results_end,
)

REGION = range(1000, 2000)
ROW = [1000, 24, "f32", [2, 3], [3, 1], 0, "cpu"]
TENSOR = ReportedTensor(1000, 24, "f32", (2, 3), (3, 1), "cpu")


def parsed(**fields: Any) -> CallReply:
    return CallReply.from_wire(fields, REGION)


def test_a_whole_reply_is_parsed():
    returned = [{"T": ROW, "same": [0], "alias": [0, 1], "class": "Lazy"}, 3, {"complex": [1.0, 2.0]}, None]
    reply = parsed(returned=returned, inputs=[ROW, None], state=["a"], shares_result=False, calls={"abs": 2, "b": "c"})
    first, *others = reply.returned
    assert (first.same, first.aliases, first.subclass) == ((0,), (0, 1), "Lazy")
    assert others == [3, 1 + 2j, None]
    assert reply.inputs == (TENSOR, None)
    assert (reply.state_changes, reply.calls, reply.malformed) == (("a",), {"abs": 2}, "")
    assert results_end([reply, parsed(returned=None)], REGION) == 1024
    assert parsed(returned={"junk": "builtins.dict"}).returned == ReportedObject("builtins.dict")


@pytest.mark.parametrize(
    "row",
    [
        5,
        [1, 2],
        [999, *ROW[1:]],
        [1000.0, *ROW[1:]],
        [1980, *ROW[1:]],
        [1000, -24, *ROW[2:]],
        [1000, 20, *ROW[2:]],
        [*ROW[:2], "f33", *ROW[3:]],
        [*ROW[:3], [2, "3"], *ROW[4:]],
        [*ROW[:3], [-2, -3], *ROW[4:]],
        [*ROW[:4], [1], *ROW[5:]],
        [*ROW[:6], None],
    ],
)
def test_a_tensor_that_cannot_be_is_malformed(row):
    for reply in (parsed(returned=[{"T": row}]), parsed(returned=None, inputs=[row])):
        assert reply.malformed
        assert reply.tensors == []
        assert results_end([reply], REGION) == 1000


def test_what_a_judge_looks_at_before_a_malformed_field_is_kept():
    reply = parsed(escape_attempts="tried it", bypass=["abs"], raised=["Error", "no"], state=5, late=True)
    assert (reply.escape_attempts, reply.bypass, reply.raised) == ("tried it", ("abs",), ("Error", "no"))
    assert (reply.state_changes, reply.late) == ((), False)
    assert reply.malformed
    deep: list[Any] = []
    for _ in range(500):
        deep = [deep]
    wrong = (
        {"raised": 5},
        {"bypass": 5},
        {"returned": {"x": 1}},
        {"returned": {"complex": [1, 2]}},
        {"returned": deep},
    )
    assert all(parsed(**fields).malformed for fields in ({}, *wrong))
    assert not parsed(raised=["Error", "no"]).malformed


@pytest.mark.parametrize("reply", [5, None, [], {}, {"results": 5}, {"results": [5]}, {"results": [{}, {}]}])
def test_a_reply_of_another_form_is_refused(reply):
    with pytest.raises(MalformedReplyError, match=MALFORMED_REPLY):
        CallsReply.from_wire(reply, 1, REGION)


def test_tampering_comes_before_all_else():
    assert ResultReply.from_wire({"tampered": "all", "result": 5}, REGION).tampered == ("all",)
    with pytest.raises(MalformedReplyError):
        ResultReply.from_wire({"result": 5}, REGION)


def test_loading_is_refused_for_anything_that_is_reported():
    assert not LoadReply.from_wire({}).is_refused
    for reply in ({"escape_attempts": "x"}, {"error": ""}, {"tampered": ["x"]}, {"state": ["x"]}):
        assert LoadReply.from_wire(reply).is_refused
    for reply in (5, {"state": 5}):
        with pytest.raises(MalformedReplyError):
            LoadReply.from_wire(reply)


@pytest.mark.parametrize("rows", [5, [], [5], [[1]], [[1, "2"]], [[1, -2]], [[1, 1 << 63]], [[1, True]]])
def test_addresses_that_cannot_be_are_refused(rows):
    with pytest.raises(MalformedReplyError):
        HostAllocateReply.from_wire({"inputs": rows}, 1, 2)


def test_locations_are_parsed_for_the_call_asked_for():
    reply = AllocateReply.from_wire({"inputs": [[["ab", 8]]], "results": [5, [None, ["", 9]]], "method": "graph"}, 1, 1)
    assert reply.inputs == [[("ab", 8)]]
    assert reply.capture_failure is None
    assert locations(reply.results, 1, 2) == [None, ("", 9)]
    for call, parts in ((0, 2), (1, 1), (2, 2)):
        with pytest.raises(MalformedReplyError):
            locations(reply.results, call, parts)


def test_times_that_cannot_be_are_not_believed():
    assert is_time(1.5)
    assert not any(map(is_time, (0, -1, float("nan"), float("inf"), 10**400, "1", None)))
    assert EstimateReply.from_wire({"device_ns": -1, "call_ns": 5}) == EstimateReply(1e6, 5.0)
    assert raised_text({}) is None
    assert [raised_text({"raised": raised}) for raised in (["Error", "no"], 5)] == ["no", "5"]


@pytest.mark.parametrize("counts", [5, {"correctness": "5"}, {"correctness": -1}, {"correctness": 1 << 40}])
def test_numbers_of_tests_that_cannot_be_are_refused(counts):
    assert InputTestsReply.from_wire({"counts": {"correctness": 2}, "errors": {}}).counts == {"correctness": 2}
    with pytest.raises(MalformedReplyError):
        InputTestsReply.from_wire({"counts": counts, "errors": {}})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["f32", "cpu"]),
    lambda part: (
        st.lists(part, max_size=4)
        | st.dictionaries(st.text(max_size=4) | st.sampled_from(["T", "complex", "dtype", "junk"]), part, max_size=3)
    ),
    max_leaves=12,
)
FIELDS = (
    "escape_attempts", "exited", "mutant", "bypass", "raised", "state", "reshaped", "written_through", "late", "calls",
    "unusable", "inputs", "returned", "tampered", "error", "counts", "errors", "results", "method", "failure", "ns",
    "device_ns", "call_ns", "result",
)  # fmt: skip


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # machines are busy
@given(st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_whatever_a_worker_replies_is_parsed_or_refused(reply):
    readers = (
        lambda: CallReply.from_wire(reply, REGION).tensors,
        lambda: CallsReply.from_wire(reply, 1, REGION),
        lambda: LoadReply.from_wire(reply),
        lambda: IntegrityReply.from_wire(reply),
        lambda: InputTestsReply.from_wire(reply),
        lambda: HostAllocateReply.from_wire(reply, 1, 1),
        lambda: AllocateReply.from_wire(reply, 1, 1),
        lambda: EstimateReply.from_wire(reply),
        lambda: ResultReply.from_wire(reply, REGION),
        lambda: raised_text(reply),
        lambda: fault(reply),
    )
    for read in readers:
        with contextlib.suppress(MalformedReplyError):
            read()


@pytest.mark.parametrize("deep", ["exited", "escape_attempts", "unusable", "returned"])
def test_deeply_nested_values_are_refused(deep):
    value: Any = "text"
    for _ in range(sys.getrecursionlimit() - 60):
        value = [value]
    assert parsed(**{"returned": None, deep: value}).malformed


@pytest.mark.parametrize(
    ("shape", "strides"),
    [([0, 1 << 63], [1, 1]), ([1] * 65, [1] * 65), ([0, 10**400], [1, 1]), ([1], [1 << 63]), ([1], [-(10**400)])],
)
def test_shapes_and_strides_that_no_tensor_has_are_refused(shape, strides):
    row = [1000, 0 if 0 in shape else 4, "f32", shape, strides, 0, "cpu"]
    assert parsed(returned={"T": row}).malformed


@pytest.mark.parametrize("offset", [-1, 1 << 63, True, 1.0, None])
def test_addresses_that_no_memory_has_are_refused(offset):
    assert locations([[["handle", 5]]], 0, 1) == [("handle", 5)]
    with pytest.raises(MalformedReplyError):
        locations([[["handle", offset]]], 0, 1)
