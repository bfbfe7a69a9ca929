"""Situations are what they say, and leave the process as it was; results that are kept are told apart by their memory."""

from __future__ import annotations

import itertools
import sys
import threading
from time import monotonic

import pytest
import torch

from opforge.sandbox.guest import situations
from opforge.sandbox.guest.aliases import InputAliases
from opforge.sandbox.guest.global_state import GlobalState
from opforge.sandbox.guest.kept_results import KeptResults, call_and_keep
from opforge.sandbox.guest.situations import call_in, call_in_two_threads, input_for

X = torch.arange(6.0)


@pytest.mark.parametrize(
    ("situation", "seen"),
    [
        ("grad_mode", torch.is_grad_enabled),
        ("inference_mode", torch.is_inference_mode_enabled),
        ("thread", lambda: threading.current_thread() is not threading.main_thread()),
        ("default_dtype", lambda: torch.tensor(0.5).dtype == torch.float64),
    ],
)
def test_a_situation_holds_during_the_call_and_no_longer(situation, seen):
    with torch.no_grad():
        before = GlobalState.now()
        assert call_in(situation, seen, [], {})
        assert not seen()
        with pytest.raises(ZeroDivisionError):
            call_in(situation, lambda: 1 / 0, [], {})
        assert GlobalState.now() == before


def test_inputs_of_a_situation():
    assert input_for("requires_grad", X.clone()).requires_grad
    assert not input_for("requires_grad", torch.arange(3)).requires_grad
    original = X.clone()
    clone = input_for("lazy_clone", original)
    clone += 1
    assert torch.equal(original, X)


def test_two_threads_do_not_disturb_a_kernel_that_keeps_to_itself_and_do_disturb_one_that_does_not():
    scratch = torch.empty(6)

    def alone(x):
        return (x * 2).add(1)

    def shared(x):
        scratch.copy_(x)
        scratch.mul_(2)
        return scratch.add(1)

    def fresh():
        tensor = X.clone()
        return [tensor], {}, [tensor]

    result, (given,) = call_in_two_threads(alone, fresh)
    assert torch.equal(given, X)
    assert torch.equal(result, X * 2 + 1)
    assert any(not torch.equal(call_in_two_threads(shared, fresh)[0], X * 2 + 1) for _ in range(20))


def test_results_of_two_calls_share_no_memory():
    kept = KeptResults()
    first, whole = torch.zeros(4), torch.zeros(8)
    assert not kept.add(0, first, InputAliases([]))
    assert not kept.add(1, [whole[:4], None], InputAliases([]))
    assert not kept.add(2, whole[4:], InputAliases([])), "beside each other"
    assert kept.add(3, whole[3:5], InputAliases([]))
    assert not kept.add(4, X[:2], InputAliases([X])), "a view of an input"
    first += 1
    assert [*kept.changed_calls()] == [0]


@pytest.mark.parametrize(("ring", "shared"), [(1, True), (300, True), (5000, False)])
def test_a_ring_of_results_is_seen_when_it_comes_round(ring, shared):
    buffers = itertools.cycle([torch.empty(6) for _ in range(ring)])
    _, found = call_and_keep(lambda: next(buffers).copy_(X), [X])
    assert found == shared


GIVEN = torch.linspace(-3, 3, 12)


def fresh():
    tensor = GIVEN.clone()
    return [tensor], {}, [tensor]


def of_one_buffer():
    """Return a function that keeps an intermediate result where another thread's call finds it."""
    scratch = torch.empty(12)

    def function(x):
        scratch.copy_(x)
        scratch.mul_(2)
        return scratch.clone()

    return function


def test_a_shared_buffer_shows_every_time():
    for _ in range(25):
        result, _ = call_in_two_threads(of_one_buffer(), fresh)
        assert not torch.equal(result, 2 * GIVEN)


def test_a_kernel_with_a_lock_of_its_own_is_right():
    lock, unsafe = threading.Lock(), of_one_buffer()

    def function(x):
        with lock:
            return unsafe(x)

    result, inputs = call_in_two_threads(function, fresh)
    assert torch.equal(result, 2 * GIVEN)
    assert torch.equal(inputs[0], GIVEN)


def test_what_a_kernel_raises_in_the_other_thread_does_not_hold_up_the_first():
    def function(x):
        if torch.equal(x, GIVEN):
            return x + 0
        raise ValueError("not these contents")

    result, _ = call_in_two_threads(function, fresh)
    assert torch.equal(result, GIVEN)


def test_threads_go_on_without_turns_when_those_have_taken_long(monkeypatch):
    monkeypatch.setattr(situations, "_TURNS_S", 0.01)
    monkeypatch.setattr(situations, "_TURN_S", 60.0)  # a thread that waited for a turn would wait so long
    steps = []

    def function(x):
        steps.extend(len(()) for _ in range(20_000))
        return x + 1

    result, _ = call_in_two_threads(function, fresh)
    assert torch.equal(result, GIVEN + 1)
    assert len(steps) >= 20_000


def test_threads_switch_as_usual_after_the_time_limit(monkeypatch):
    """Threads that switch all the time get nowhere on a busy machine."""
    monkeypatch.setattr(situations, "_TURNS_S", 0.05)
    monkeypatch.setattr(situations, "_ROUNDS_S", 0.05)
    usual, main, seen = sys.getswitchinterval(), threading.get_ident(), []

    def function(x):
        give_up = monotonic() + 30
        while threading.get_ident() != main and sys.getswitchinterval() < usual and monotonic() < give_up:
            pass
        seen.append(sys.getswitchinterval())
        return x + 1

    result, _ = call_in_two_threads(function, fresh)
    assert torch.equal(result, GIVEN + 1)
    assert seen[0] < usual
    assert seen[-1] == usual
