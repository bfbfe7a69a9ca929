"""What a race makes of its rounds: the interval, when it ends, what is set aside, and whether the clocks agree."""

from __future__ import annotations

import numpy as np
import pytest

from opforge.judge.timing.measurement import Measurement, Wait, median_interval
from opforge.judge.verdict import RejectedError, VerdictKind
from opforge.sandbox.guest.timed_calls import rehearsal_calls
from tests.conftest import slow

MS = 1e6


def measurement(ratios, *, name="call", calls=10, aten_ns=1 * MS, waited=(), left_out=(), **words):
    """Return a figure after as many rounds as there are ratios.

    In those numbered in ``waited`` a side had no core, and in those in ``left_out`` the times do not hold that.
    """
    waits = dict.fromkeys(waited, Wait.INCLUDED) | dict.fromkeys(left_out, Wait.EXCLUDED)
    count = len(ratios)
    return Measurement(
        name,
        calls,
        kernel_ns=[aten_ns / ratio for ratio in ratios],
        aten_ns=[aten_ns] * count,
        waits=[waits.get(number, Wait.NONE) for number in range(count)],
        **{"kernel_overhead_ns": [0.1 * MS] * count, "aten_overhead_ns": [0.1 * MS] * count, **words},
    )


@pytest.mark.parametrize("count", [10, 11, *map(slow, (16, 21, 26, 30, 75, 104)), 200])
@pytest.mark.parametrize("shape", ["exponential", "normal", "uniform"])
def test_the_interval_holds_the_median_in_95_of_100_and_neither_end_misses_more_than_the_other(count, shape):
    draws = 20_000
    generator = np.random.default_rng(count)
    sample = {
        "exponential": lambda size: generator.exponential(1 / np.log(2), size),
        "normal": lambda size: generator.normal(1.0, 0.1, size),
        "uniform": lambda size: generator.uniform(0.5, 1.5, size),
    }[shape]((draws, count))
    low, high = np.array([median_interval(row) for row in np.sort(sample, axis=1).tolist()]).T
    slack = 4 * np.sqrt(0.025 / draws)
    assert np.mean(low > 1) < 0.025 + slack
    assert np.mean(high < 1) < 0.025 + slack
    assert np.mean((low <= 1) & (high >= 1)) < 0.995  # nor is it wider than it need be


def test_the_interval_of_the_inverse_is_the_inverse_of_the_interval():
    sample = sorted(np.random.default_rng(1).lognormal(0, 0.1, 37).tolist())
    low, high = median_interval(sample)
    assert median_interval(sorted(1 / x for x in sample)) == (1 / high, 1 / low)


def test_surer_intervals_are_wider_and_those_of_few_are_all_there_is():
    sample = [float(n) for n in range(100)]
    (low, high), (surely_low, surely_high) = median_interval(sample), median_interval(sample, 3.3)
    assert surely_low < low < high < surely_high
    assert median_interval([1.0, 2.0, 3.0]) == (1.0, 3.0)


def test_a_row_has_the_medians_and_every_field():
    row = measurement([2.0] * 8 + [1.9, 2.1, 2.0]).row()
    assert set(row) == {"kernel_us", "aten_us", "speedup", "low", "high", "rounds", "set_aside", "calls"}
    assert (row["kernel_us"], row["aten_us"], row["speedup"]) == (500.0, 1000.0, 2.0)
    assert (row["rounds"], row["set_aside"], row["calls"]) == (11, 0, 10)


def test_an_interval_is_wider_by_what_places_in_memory_do():
    low, high = measurement([2.0] * 12).interval
    assert (low, high) == pytest.approx((2.0 / 1.002, 2.0 * 1.002))


def test_an_interval_of_device_times_is_wider_by_their_resolution_too():
    low, high = measurement([2.0] * 12, name="device", aten_ns=2000.0).interval  # 5 ns of the shorter one, 1000
    assert (low, high) == pytest.approx((2.0 / 1.007, 2.0 * 1.007))


def test_an_interval_of_what_takes_no_time_on_the_device_is_above_zero():
    low, high = measurement([1.0] * 12, name="device", aten_ns=1.5).interval  # a view: nothing is launched
    assert 0 < low < 0.5
    assert high > 2


def test_a_race_has_eight_rounds_at_least_and_ends_when_the_interval_is_narrow():
    assert not measurement([1.0] * 6).next_round_is_last(out_of_time=False)
    assert not measurement([1.0] * 6).next_round_is_last(out_of_time=True)
    assert measurement([1.0] * 7).next_round_is_last(out_of_time=False)


def test_a_race_goes_on_while_the_interval_is_wide_and_there_is_time():
    wide = [1.0, 1.1] * 20
    assert not measurement(wide).is_precise
    assert not measurement(wide).next_round_is_last(out_of_time=False)
    assert measurement(wide).next_round_is_last(out_of_time=True)


@pytest.mark.parametrize(("name", "most"), [("device", 0.015), ("call", 0.02), ("sync", 0.02)])
def test_how_narrow_is_narrow(name, most):
    assert measurement([1.0, 1.0 + 0.9 * most] * 10, name=name).is_precise
    assert not measurement([1.0, 1.0 + 1.2 * most] * 10, name=name).is_precise


def test_a_figure_beside_another_one_ends_after_five_rounds_however_wide():
    wide = [1.0, 1.5, 0.7, 1.2]
    assert not measurement(wide[:3], secondary=True).next_round_is_last(out_of_time=True)
    assert measurement(wide, secondary=True).next_round_is_last(out_of_time=False)


def test_rounds_in_which_a_side_waited_for_a_core_are_set_aside():
    found = measurement([1.0, 9.0, 1.0, 0.1, 1.0, 1.0, 1.0, 1.0, 9.0, 1.0], waited=(1, 3, 8))
    row = found.row()
    assert found.ratios == [1.0] * 7
    assert found.is_precise
    assert (row["rounds"], row["set_aside"], row["speedup"]) == (7, 3, 1.0)
    assert (row["kernel_us"], row["aten_us"]) == (1000.0, 1000.0)


def test_where_hardly_a_round_was_quiet_all_of_them_count():
    row = measurement([1.0, 2.0] * 5, waited=range(5, 10)).row()
    assert (row["rounds"], row["set_aside"], row["speedup"]) == (10, 0, 1.5)
    row = measurement([1.0, 2.0] * 5, waited=range(6, 10)).row()
    assert (row["rounds"], row["set_aside"]) == (6, 4)


def test_where_hardly_a_round_was_quiet_those_count_whose_times_hold_no_wait():
    ratios = [1.0] * 4 + [2.0] * 6 + [9.0] * 8
    found = measurement(ratios, left_out=range(4, 10), waited=range(10, 18))
    assert found.row()["speedup"] == 2.0
    assert found.row()["set_aside"] == 8
    assert not found.needs_more_rounds
    busy = measurement(ratios, left_out=range(4, 5), waited=range(5, 18))
    assert busy.row()["set_aside"] == 0
    assert busy.needs_more_rounds


@pytest.mark.parametrize("method", ["graph", "events"])
@pytest.mark.parametrize("calls", [16, 64])
def test_the_work_of_a_block_is_all_that_is_called_in_it(method, calls):
    short = 16 if method == "graph" and calls == 64 else 0
    assert Measurement("device", calls, method=method).block_calls == calls + short
    assert Measurement("call", calls).block_calls == calls
    assert Measurement("sync", 1, warmup_calls=rehearsal_calls(sets=calls, calls=1)).block_calls == 9


def test_a_kernel_whose_blocks_take_much_longer_than_it_says_is_a_cheat():
    found = measurement([10.0] * 12, kernel_overhead_ns=[9.1 * MS] * 12)
    with pytest.raises(RejectedError) as raised:
        found.check_clocks()
    assert raised.value.verdict.kind is VerdictKind.CHEATED
    assert raised.value.verdict.reason == ("says that 10 calls took 1 ms; by the judge's clock it was at least 10 ms")


def test_what_blocks_cost_beside_on_both_sides_is_no_contradiction():
    measurement([1.0] * 12, kernel_overhead_ns=[50 * MS] * 12, aten_overhead_ns=[50 * MS] * 12).check_clocks()


def test_a_kernel_that_is_slower_beside_by_little_is_not_accused():
    measurement([1.0] * 12, kernel_overhead_ns=[1.0 * MS] * 12).check_clocks()  # of 10 ms that it says
    short = {"aten_ns": 1000.0, "kernel_overhead_ns": [0.15 * MS] * 12}
    measurement([1.0] * 12, **short).check_clocks()  # within what a message may take


def test_nobody_is_accused_by_a_clock_that_contradicts_atens_times_too():
    """Seen with four processes on one GPU: ATen's calls took less by the judge's clock than ATen's worker said."""
    busy = measurement([1.0] * 32, kernel_overhead_ns=[1.5 * MS] * 32, aten_overhead_ns=[-1.5 * MS] * 32)
    busy.check_clocks()
    assert busy.row()["speedup"] < 1  # what the clock surely saw still counts
    quiet = measurement([1.0] * 32, kernel_overhead_ns=[1.5 * MS] * 32, aten_overhead_ns=[-0.9 * MS] * 32)
    with pytest.raises(RejectedError, match="by the judge's clock"):
        quiet.check_clocks()


@pytest.mark.parametrize("honest", [1, 2, 5])
def test_a_kernel_that_is_honest_in_a_round_or_two_gains_nothing_in_the_others(honest):
    rounds = 16
    lies = rounds - honest
    found = measurement(
        [0.5] * honest + [1.5] * lies, kernel_overhead_ns=[0.1 * MS] * honest + [(0.1 + 20 - 20 / 3) * MS] * lies
    )
    row = found.row()
    assert row["speedup"] < 0.6  # 10 calls of 2 ms: it says 0.67 ms, and the judge allows a tenth of that
    assert row["low"] < 0.6
    assert row["kernel_us"] > 1700


def test_what_is_said_of_rounds_that_do_not_count_gives_no_slack_in_those_that_do():
    ratios = [1.0] * 8 + [0.01] * 12  # says 100 ms of the rounds in which it waits, by its own doing
    lies = [4.1 * MS] * 8 + [0.1 * MS] * 12
    found = measurement(ratios, kernel_overhead_ns=lies, waited=range(8, 20))
    assert found.median_ns(found.kernel_ns) == 1 * MS
    assert found.row()["speedup"] < 0.8  # 10 ms that it says, 4 ms that it does not, of which one is allowed


def test_a_side_that_was_disturbed_beside_its_calls_is_no_quicker_for_it():
    calm, disturbed = [0.1 * MS] * 12, [0.1 * MS] * 9 + [5 * MS] * 3
    for kernel, aten in ((disturbed, calm), (calm, disturbed)):
        assert measurement([1.0] * 12, kernel_overhead_ns=kernel, aten_overhead_ns=aten).row()["speedup"] == 1.0


def test_a_kernel_during_whose_stops_the_gpu_works_on_is_a_cheat():
    measurement([1.0] * 12, kernel_fill_ns=[0.5 * MS] * 12, aten_fill_ns=[0.2 * MS] * 12).check_clocks()
    now_and_then = [3 * MS, *[0.2 * MS] * 11]
    measurement([1.0] * 12, kernel_fill_ns=now_and_then, aten_fill_ns=[0.2 * MS] * 12).check_clocks()
    with pytest.raises(RejectedError, match="keeps the GPU busy while its process is stopped"):
        measurement([1.0] * 12, kernel_fill_ns=[2.1 * MS] * 12, aten_fill_ns=[0.2 * MS] * 12).check_clocks()
    with pytest.raises(RejectedError, match="keeps the GPU busy while its process is stopped"):
        measurement([1.0] * 12, kernel_fill_ns=[0.2 * MS] * 12, aten_fill_ns=[2.1 * MS] * 12).check_clocks()


def test_a_kernel_that_keeps_the_gpu_busy_in_most_rounds_is_a_cheat_or_those_do_not_count():
    for clean in range(33):
        busy = [*[0.2 * MS] * clean, *[2.1 * MS] * (32 - clean)]
        waited = range(clean, 32)  # the rounds in which the judge waited for the GPU
        words = {"kernel_fill_ns": [0.2 * MS] * 32, "aten_fill_ns": busy, "waited": waited}
        found = measurement([1.0] * clean + [3.0] * (32 - clean), **words)
        if found.row()["speedup"] != 1.0:
            with pytest.raises(RejectedError, match="keeps the GPU busy"):
                found.check_clocks()


def test_a_few_blocks_that_were_disturbed_do_not_make_a_cheat():
    beside = [0.1 * MS] * 12
    beside[3] = beside[7] = beside[8] = 400 * MS
    measurement([1.0] * 12, kernel_overhead_ns=beside).check_clocks()


def test_where_the_clocks_seem_to_differ_more_rounds_are_asked_for():
    narrow = measurement([1.0] * 12)
    assert narrow.next_round_is_last(out_of_time=False)
    odd = measurement([1.0] * 12, kernel_overhead_ns=[1.3 * MS] * 12)
    assert odd.is_precise
    assert not odd.next_round_is_last(out_of_time=False)
    assert not odd.next_round_is_last(out_of_time=True)  # nobody is held to lie by a few rounds, however late it is
    assert measurement([1.0] * 31, kernel_overhead_ns=[1.3 * MS] * 31).next_round_is_last(out_of_time=True)
    few = {"kernel_overhead_ns": [1.3 * MS] * 4, "secondary": True}
    assert not measurement([1.0] * 4, **few).next_round_is_last(out_of_time=True)


def test_the_rounds_of_a_leg_count_as_one():
    allocations = [[1.0, 1.2, 1.1], [2.0, 2.1, 9.0], *([[1.5, 1.5, 1.5]] * 4)]
    made = measurement([ratio for allocation in allocations for ratio in allocation])
    made.relayout_every = 3
    assert made.ratios == pytest.approx([1.1, 1.5, 1.5, 1.5, 1.5, 2.1])
    assert made.row()["rounds"] == 18
    short = measurement([1.0] * 16)
    short.relayout_every = 3
    assert not short.next_round_is_last(out_of_time=True)  # six allocations are needed for an interval


def test_what_differs_between_legs_is_in_the_interval():
    offsets = [0.95, 1.05, 0.97, 1.03, 0.96, 1.04]
    made = measurement([offset for offset in offsets for _ in range(3)])
    made.relayout_every = 3
    low, high = made.interval
    assert low < 0.96
    assert high > 1.04
