"""The calls that are timed: what their inputs hold, that their memory is their own, and whose result is shown. Real tracks on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from opforge.cases.materialise import flat_storage, owned_copy, renewed, seeded_bytes, tensor_over
from opforge.cases.values import DTYPES, TensorSpec
from opforge.sandbox.track import Track, short_calls

CPU = torch.device("cpu")
SEEDS = [3, 1, 1_000_000_007, 12]
SMALL, LARGER = (5, 7), (61, 97)
"""Shapes of a small and a larger input."""


class Laid:
    """A case whose tensors lie in a bytearray, and tracks over it."""

    def __init__(self, *specs: TensorSpec) -> None:
        self.arena, self.rows = bytearray(64), []
        for number, spec in enumerate(specs):
            geometry = [list(spec.shape), list(spec.strides), spec.offset]
            self.rows.append([len(self.arena), spec.storage_nbytes, spec.dtype, *geometry, None])
            self.arena += seeded_bytes(spec, f"tensor {number}").tobytes()
            self.arena += bytes(-len(self.arena) % 64)

    def track(self, function, calls=4, sets=None, args=None, kwargs=None, positions=False):
        """Return a track with calls laid out on it; the arguments are the tensors unless they are given."""
        given = [{"T": row} for row in self.rows] if args is None else args
        track = Track(function, {"args": given, "kwargs": kwargs or {}, "positions": positions}, self.arena, CPU)
        assert track.lay(calls, sets or calls, graph=True, cold=0) == {}
        return track

    def contents(self, number: int, seed: int) -> torch.Tensor:
        """Return the tensor as it must be in a call on contents with a seed."""
        return renewed(owned_copy(tensor_over(self.arena, self.rows[number])), seed)


def block(figure="call", calls=4, passes=1, seeds=(), shift=0):
    return {"figure": figure, "calls": calls, "passes": passes, "ahead_ns": 0, "seeds": list(seeds), "shift": shift}


def timed(track, **words):
    """Time a block, and return what was said of it."""
    track.prepare(block(**words))
    return track.go()


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same geometry, and the same bytes in all of their memory."""
    geometry = [(t.dtype, t.shape, t.stride(), t.storage_offset()) for t in (one, other)]
    return geometry[0] == geometry[1] and torch.equal(flat_storage(one), flat_storage(other))


def itself(*tensors):
    return tensors


@pytest.mark.parametrize("shape", [SMALL, LARGER, (), (1,), (0, 3)])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_contents_are_renewed_as_the_judge_renews_them(dtype, shape):
    laid = Laid(TensorSpec(shape, dtype))
    track = laid.track(itself)
    timed(track, seeds=SEEDS)
    for call, seed in enumerate(SEEDS):
        _, (given,) = track.shown(call)
        assert same_memory(given, laid.contents(0, seed))


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "f64", "c64", "c128"])
@pytest.mark.parametrize("shape", [SMALL, LARGER])
def test_floats_differ_from_call_to_call(dtype, shape):
    track = Laid(TensorSpec(shape, dtype)).track(itself)
    timed(track, seeds=[1, 2, 3, 4])
    memories = {flat_storage(track.shown(call)[1][0]).numpy().tobytes() for call in range(4)}
    assert len(memories) == 4


@pytest.mark.parametrize("dtype", ["i64", "i32", "u8"])
def test_integers_that_may_be_indices_stay_where_they_are(dtype):
    laid = Laid(TensorSpec(SMALL, dtype), TensorSpec(SMALL, "f32"))
    track = laid.track(itself, positions=True)
    timed(track, seeds=[1, 2, 3, 4])
    for call in range(4):
        indices, floats = track.shown(call)[1]
        assert same_memory(indices, laid.contents(0, 0))
        assert not same_memory(floats, laid.contents(1, 0))


@pytest.mark.parametrize("scale", [1, 40])
@pytest.mark.parametrize(
    ("shape", "stride", "offset"),
    [
        ((6, 8), (1, 6), 0),
        ((6, 8), (16, 2), 3),
        ((6, 8), (0, 1), 0),
        ((6, 8), (8, 1), 5),
        ((6, 8), (0, 0), 0),
    ],
    ids=["transposed", "strided", "expanded", "offset", "one element"],
)
def test_geometry_stays_and_all_of_the_memory_is_renewed(shape, stride, offset, scale):
    scaled = (shape[0] * scale, shape[1])
    stride = (stride[0], stride[1] * scale) if stride == (1, 6) else stride
    laid = Laid(TensorSpec(scaled, "f32", stride, offset))
    track = laid.track(itself)
    timed(track, seeds=SEEDS)
    for call, seed in enumerate(SEEDS):
        assert same_memory(track.shown(call)[1][0], laid.contents(0, seed))


def test_tensors_in_lists_and_by_name_are_renewed_too():
    specs = [TensorSpec((3, 4), "f32"), TensorSpec((5, 4), "f32"), TensorSpec((8, 4), "f32")]
    laid = Laid(*specs)
    first, second, out = ({"T": row} for row in laid.rows)

    def scaled_cat(tensors, dim, *, out, scale):
        return torch.cat(tensors, dim).mul_(scale), out

    track = laid.track(scaled_cat, args=[[first, second], 0], kwargs={"out": out, "scale": 2.0})
    timed(track, seeds=SEEDS)
    for call, seed in enumerate(SEEDS):
        (joined, third), given = track.shown(call)
        assert [same_memory(t, laid.contents(n, seed)) for n, t in enumerate(given)] == [True] * 3
        assert torch.equal(joined, 2 * torch.cat([laid.contents(0, seed), laid.contents(1, seed)]))
        assert third is given[2]


def test_a_shift_moves_the_contents_round_the_calls():
    laid = Laid(TensorSpec(SMALL, "f32"))
    track = laid.track(itself)
    track.prepare(block(seeds=SEEDS))
    for shift in (0, 1, 3, 4, 9):
        track._put(4, shift)
        track._pipelined(4)
        for call in range(4):
            seed = SEEDS[(call + shift) % 4]
            assert same_memory(track.shown(call)[1][0], laid.contents(0, seed)), (shift, call)


def test_more_calls_than_sets_go_round_the_sets():
    laid = Laid(TensorSpec(SMALL, "f32"))
    track = laid.track(torch.neg, calls=7, sets=3)
    timed(track, calls=7, seeds=[5, 6, 7])
    for call in range(7):
        result, (given,) = track.shown(call)
        assert same_memory(given, laid.contents(0, [5, 6, 7][call % 3]))
        assert torch.equal(result, -laid.contents(0, [5, 6, 7][call % 3]))
    assert len({track.shown(call)[0].data_ptr() for call in range(7)}) == 7


def test_seeds_for_a_few_calls_leave_the_contents_of_the_others():
    laid = Laid(TensorSpec(SMALL, "f32"))
    track = laid.track(itself)
    timed(track, seeds=SEEDS)
    timed(track, seeds=[8, 9])
    for call, seed in enumerate([8, 9, *SEEDS[2:]]):
        assert same_memory(track.shown(call)[1][0], laid.contents(0, seed))


@pytest.mark.parametrize("calls", [1, 3, 4])
def test_results_shown_are_those_of_the_call_asked_for(calls):
    laid = Laid(TensorSpec(LARGER, "f32"))
    track = laid.track(torch.exp)
    said = timed(track, calls=calls, seeds=SEEDS[:calls])
    assert said > 0
    for call in range(calls):
        result, given = track.shown(call)
        assert torch.equal(result, torch.exp(laid.contents(0, SEEDS[call])))
        assert torch.equal(given[0], laid.contents(0, SEEDS[call]))
    with pytest.raises(IndexError):
        track.shown(calls)


def test_every_block_starts_from_fresh_contents_where_calls_write_to_their_inputs():
    laid = Laid(TensorSpec(SMALL, "f64"), TensorSpec(LARGER, "f64"))

    def wreck(small, large):
        return small.mul_(-1).add_(1), large.zero_()

    track = laid.track(wreck)
    for seeds in (SEEDS, [], [9, 8, 7, 6]):
        timed(track, seeds=seeds)
        current = seeds or SEEDS
        for call, seed in enumerate(current):
            (small, large), given = track.shown(call)
            assert small is given[0]
            assert large is given[1]
            assert torch.equal(small, 1 - laid.contents(0, seed))
            assert not large.any()


def test_nothing_is_written_to_the_shared_memory_by_calls_that_write():
    laid = Laid(TensorSpec(SMALL, "f32"))
    before = bytes(laid.arena)
    track = laid.track(lambda x: x.zero_())
    timed(track, seeds=SEEDS)
    assert bytes(laid.arena) == before


def test_calls_have_memory_of_their_own_and_another_one_each_time_they_are_laid():
    laid = Laid(TensorSpec(SMALL, "f32"), TensorSpec(LARGER, "i64"))
    track = laid.track(itself)

    def places():
        timed(track, seeds=[])
        return {t.untyped_storage().data_ptr() for call in range(4) for t in track.shown(call)[1]}

    first = places()
    assert len(first) == 8
    for calls in (4, 8):
        track.lay(calls, calls, graph=True, cold=0)
        again = places()
        assert len(again) == 8
        assert not first & again
        first = again


def test_a_track_that_is_laid_again_has_the_contents_of_the_case_until_they_are_renewed():
    laid = Laid(TensorSpec(SMALL, "f32"))
    track = laid.track(itself)
    timed(track, seeds=SEEDS)
    track.lay(4, 4, graph=True, cold=0)
    timed(track, seeds=[])
    assert all(same_memory(track.shown(call)[1][0], laid.contents(0, 0)) for call in range(4))


def test_a_guess_is_a_time():
    track = Laid(TensorSpec(LARGER, "f32")).track(torch.exp, calls=8)
    guessed = track.guess()
    assert set(guessed) == {"call_ns"}
    assert guessed["call_ns"] > 0


def test_what_a_function_raises_comes_through_and_the_track_goes_on():
    calls = [0]

    def moody(x):
        calls[0] += 1
        if calls[0] == 3:
            raise ValueError("not today")
        return -x

    laid = Laid(TensorSpec(SMALL, "f32"))
    track = laid.track(moody)
    track.prepare(block(seeds=SEEDS))
    with pytest.raises(ValueError, match="not today"):
        track.go()
    assert timed(track, seeds=SEEDS) > 0
    assert torch.equal(track.shown(2)[0], -laid.contents(0, SEEDS[2]))


def test_an_unknown_figure_is_refused():
    track = Laid(TensorSpec(SMALL, "f32")).track(itself)
    track.prepare(block(figure="moon"))
    with pytest.raises(ValueError, match="unknown figure 'moon'"):
        track.go()


def test_a_case_without_tensors_can_be_timed():
    track = Laid().track(torch.arange, args=[7])
    assert timed(track, seeds=SEEDS) > 0
    result, given = track.shown(3)
    assert torch.equal(result, torch.arange(7))
    assert given == []


def test_a_short_pass_is_timed_beside_many_calls_only():
    assert [short_calls(n) for n in (1, 63, 64, 96)] == [0, 0, 16, 24]


def test_seeded_contents_of_the_tests_are_not_all_the_same():
    laid = Laid(TensorSpec(SMALL, "f32"))
    assert len(np.unique(laid.contents(0, 0))) > 30
