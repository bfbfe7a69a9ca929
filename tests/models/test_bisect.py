"""Who is to blame, found by asking whether sets of kernels fail."""

from __future__ import annotations

import random

import pytest

from opforge.models.bisect import find_faulty

NAMES = list("abcdefghijk")


def asking(*guilty_sets):
    """Return a question that is answered yes when a guilty set is in place, and how often it was asked."""
    asked = []

    def fails(names):
        asked.append(tuple(names))
        return any(set(group) <= set(names) for group in guilty_sets)

    return fails, asked


@pytest.mark.parametrize("name", NAMES)
def test_one_is_found_wherever_it_stands(name):
    fails, asked = asking([name])
    blame = find_faulty(NAMES, fails)
    assert (blame.faulty, blame.faulty_sets) == ([name], [])
    assert (name,) in asked  # confirmed by itself
    assert tuple(n for n in NAMES if n != name) in asked  # and nothing else is wrong
    assert blame.trials == len(asked) <= 9


def test_several_are_all_found():
    chance = random.Random(0)
    for count in range(2, 6):
        guilty = sorted(chance.sample(NAMES, count))
        fails, _ = asking(*[[g] for g in guilty])
        assert find_faulty(NAMES, fails).faulty == guilty


def test_kernels_that_fail_only_together_are_named_together():
    fails, _ = asking(["b", "j"], ["e"])
    blame = find_faulty(NAMES, fails)
    assert blame.faulty == ["e"]
    assert blame.faulty_sets == [["b", "j"]]


def test_who_is_named_already_is_tried_first():
    fails, asked = asking(["c"], ["h"])
    blame = find_faulty(NAMES, fails, "c")
    assert sorted(blame.faulty) == ["c", "h"]
    assert asked[0] == ("c",)
    innocent, _ = asking(["d"])
    assert find_faulty(NAMES, innocent, "c").faulty == ["d"]  # one who was only running when it happened


def test_a_single_suspect_needs_no_trial():
    fails, asked = asking(["a"])
    assert find_faulty(["a"], fails).faulty == ["a"]
    assert asked == []


def test_a_failure_that_does_not_come_again_ends():
    blame = find_faulty(NAMES, lambda _names: False)
    assert blame.faulty == []
    assert blame.faulty_sets == [NAMES]
