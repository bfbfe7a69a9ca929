"""The calls that are timed on a GPU: that their memory is their own, where it is said to lie, and whose result is shown. Real ones, here on the CPU."""

from __future__ import annotations

import ctypes

import pytest
import torch

from opforge.cases.tensors import flat_storage, owned_copy, renewed, seeded_bytes, tensor_from_row
from opforge.cases.values import TensorSpec
from opforge.sandbox.guest.timed_calls import TimedCalls, short_pass_calls

CPU = torch.device("cpu")
SMALL, LARGER = (5, 7), (61, 97)
"""Shapes of a small and a larger input."""


class AllocatedInputs:
    """A case whose tensors lie in a bytearray, and timed calls over it."""

    def __init__(self, *specs: TensorSpec) -> None:
        self.arena, self.rows = bytearray(64), []
        for number, spec in enumerate(specs):
            geometry = [list(spec.shape), list(spec.strides), spec.offset]
            self.rows.append([len(self.arena), spec.storage_nbytes, spec.dtype, *geometry, None])
            self.arena += seeded_bytes(spec, f"tensor {number}").tobytes()
            self.arena += bytes(-len(self.arena) % 64)

    def timed_calls(self, function, calls=4, sets=None, args=None, kwargs=None):
        """Return allocated calls, and where their inputs are said to lie; the arguments are the tensors unless they are given."""
        given = [{"T": row} for row in self.rows] if args is None else args
        timed_calls = TimedCalls(function, {"args": given, "kwargs": kwargs or {}}, self.arena, CPU)
        said = timed_calls.allocate(calls, sets or calls, graph=True, flush_bytes=0)
        assert set(said) == {"inputs"}
        return timed_calls, said["inputs"]

    def contents(self, number: int) -> torch.Tensor:
        """Return a tensor of the case."""
        return owned_copy(tensor_from_row(self.arena, self.rows[number]))


def block(quantity="call", calls=4):
    return {"quantity": quantity, "calls": calls, "ahead_ns": 0}


def timed(timed_calls, **words):
    """Time a block, and return what was said of it."""
    return timed_calls.run(block(**words))


def write(places, allocated: AllocatedInputs) -> list[list[torch.Tensor]]:
    """Do what the judge does: write new contents to where inputs are said to lie. Returns the tensors with those contents, by set."""
    written = []
    for number, row in enumerate(places):
        fresh = [renewed(allocated.contents(n), number + 2) for n in range(len(allocated.rows))]
        for (handle, address), tensor in zip(row, fresh, strict=True):
            assert handle == ""
            ctypes.memmove(address, tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        written.append(fresh)
    return written


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same geometry, and the same bytes in all of their memory."""
    geometry = [(t.dtype, t.shape, t.stride(), t.storage_offset()) for t in (one, other)]
    return geometry[0] == geometry[1] and torch.equal(flat_storage(one), flat_storage(other))


def itself(*tensors):
    return tensors


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec(SMALL, "f32"),
        TensorSpec(LARGER, "i64"),
        TensorSpec((6, 8), "f32", (16, 2), 3),
        TensorSpec((6, 8), "f64", (0, 1), 0),
        TensorSpec((6, 8), "bf16", (8, 1), 5),
        TensorSpec((), "f32"),
        TensorSpec((0, 3), "f32"),
    ],
    ids=str,
)
def test_calls_find_what_is_written_where_inputs_are_said_to_lie(spec):
    allocated = AllocatedInputs(spec)
    timed_calls, places = allocated.timed_calls(itself)
    written = write(places, allocated)
    timed(timed_calls)
    for call in range(4):
        assert same_memory(timed_calls.result(call)[1][0], written[call][0])


def test_tensors_in_lists_and_by_name_have_places_too():
    specs = [TensorSpec((3, 4), "f32"), TensorSpec((5, 4), "f32"), TensorSpec((8, 4), "f32")]
    allocated = AllocatedInputs(*specs)
    first, second, out = ({"T": row} for row in allocated.rows)

    def scaled_cat(tensors, dim, *, out, scale):
        return torch.cat(tensors, dim).mul_(scale), out

    timed_calls, places = allocated.timed_calls(
        scaled_cat, args=[[first, second], 0], kwargs={"out": out, "scale": 2.0}
    )
    written = write(places, allocated)
    timed(timed_calls)
    for call in range(4):
        (joined, third), given = timed_calls.result(call)
        assert [same_memory(t, w) for t, w in zip(given, written[call], strict=True)] == [True] * 3
        assert torch.equal(joined, 2 * torch.cat(written[call][:2]))
        assert third is given[2]


def test_more_calls_than_sets_go_round_the_sets():
    allocated = AllocatedInputs(TensorSpec(SMALL, "f32"))
    timed_calls, places = allocated.timed_calls(torch.neg, calls=7, sets=3)
    written = write(places, allocated)
    timed(timed_calls, calls=7)
    for call in range(7):
        result, (given,) = timed_calls.result(call)
        assert same_memory(given, written[call % 3][0])
        assert torch.equal(result, -written[call % 3][0])
    assert len({timed_calls.result(call)[0].data_ptr() for call in range(7)}) == 7


@pytest.mark.parametrize("calls", [1, 3, 4])
def test_results_are_where_they_are_said_to_be_and_shown_for_the_call_asked_for(calls):
    allocated = AllocatedInputs(TensorSpec(LARGER, "f32"))
    timed_calls, places = allocated.timed_calls(torch.exp)
    written = write(places, allocated)
    said = timed(timed_calls, calls=calls)
    assert said["ns"] > 0
    assert len(said["results"]) == calls
    for call in range(calls):
        result, given = timed_calls.result(call)
        assert said["results"][call] == [("", result.data_ptr())]
        assert torch.equal(result, torch.exp(written[call][0]))
        assert torch.equal(given[0], written[call][0])
    with pytest.raises(IndexError):
        timed_calls.result(calls)


def test_parts_of_a_result_that_are_no_tensors_have_no_place():
    allocated = AllocatedInputs(TensorSpec(SMALL, "f32"))
    timed_calls, _ = allocated.timed_calls(lambda x: (-x, 3, [x.to_sparse()]), calls=1)
    (first, number, sparse) = timed(timed_calls, calls=1)["results"][0]
    assert first == ("", timed_calls.result(0)[0][0].data_ptr())
    assert (number, sparse) == (None, None)


def test_nothing_is_written_to_the_shared_memory_by_calls_that_write():
    allocated = AllocatedInputs(TensorSpec(SMALL, "f32"))
    before = bytes(allocated.arena)
    timed_calls, _ = allocated.timed_calls(lambda x: x.zero_())
    timed(timed_calls)
    assert bytes(allocated.arena) == before


def test_calls_get_their_own_and_new_memory_each_time_they_are_allocated():
    allocated = AllocatedInputs(TensorSpec(SMALL, "f32"), TensorSpec(LARGER, "i64"))
    timed_calls, places = allocated.timed_calls(itself)
    first = {address for row in places for _, address in row}
    assert len(first) == 8
    for calls in (4, 8):
        again = {
            address
            for row in timed_calls.allocate(calls, calls, graph=True, flush_bytes=0)["inputs"]
            for _, address in row
        }
        assert len(again) == 2 * calls
        assert not first & again
        first = again


def test_calls_that_are_allocated_again_have_the_contents_of_the_case():
    allocated = AllocatedInputs(TensorSpec(SMALL, "f32"))
    timed_calls, places = allocated.timed_calls(itself)
    write(places, allocated)
    timed_calls.allocate(4, 4, graph=True, flush_bytes=0)
    timed(timed_calls)
    assert all(same_memory(timed_calls.result(call)[1][0], allocated.contents(0)) for call in range(4))


def test_calls_that_warm_up_have_other_inputs_and_those_are_as_in_the_case_each_time():
    allocated = AllocatedInputs(TensorSpec(SMALL, "f64"))
    seen = []

    def wreck(x):
        seen.append((x.untyped_storage().data_ptr(), x.clone()))
        return x.mul_(-1).add_(1)

    timed_calls, places = allocated.timed_calls(wreck)
    timed_at = {address for row in places for _, address in row}
    for _ in range(2):
        seen.clear()
        timed_calls.warm_up()
        assert seen
        assert not timed_at & {address for address, _ in seen}
        assert all(torch.equal(x, allocated.contents(0)) for _, x in seen)


def test_an_estimate_is_a_time():
    timed_calls, _ = AllocatedInputs(TensorSpec(LARGER, "f32")).timed_calls(torch.exp, calls=8)
    estimate = timed_calls.estimate()
    assert set(estimate) == {"call_ns"}
    assert estimate["call_ns"] > 0


def test_what_a_function_raises_comes_through_and_later_calls_go_on():
    calls = [0]

    def moody(x):
        calls[0] += 1
        if calls[0] == 3:
            raise ValueError("not today")
        return -x

    allocated = AllocatedInputs(TensorSpec(SMALL, "f32"))
    timed_calls, _ = allocated.timed_calls(moody)
    with pytest.raises(ValueError, match="not today"):
        timed(timed_calls)
    assert timed(timed_calls)["ns"] > 0
    assert torch.equal(timed_calls.result(2)[0], -allocated.contents(0))


def test_an_unknown_quantity_is_refused():
    timed_calls, _ = AllocatedInputs(TensorSpec(SMALL, "f32")).timed_calls(itself)
    with pytest.raises(ValueError, match="unknown quantity 'moon'"):
        timed(timed_calls, quantity="moon")


def test_a_case_without_tensors_can_be_timed():
    timed_calls, places = AllocatedInputs().timed_calls(torch.arange, args=[7])
    assert places == [[]] * 4
    assert timed(timed_calls)["ns"] > 0
    result, given = timed_calls.result(3)
    assert torch.equal(result, torch.arange(7))
    assert given == []


def test_a_short_pass_is_timed_beside_many_calls_only():
    assert [short_pass_calls(n) for n in (1, 63, 64, 96)] == [0, 0, 16, 24]
