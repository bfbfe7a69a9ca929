"""Calls from two threads at once: they meet inside a kernel, however busy the machine is."""

from __future__ import annotations

import threading

import torch

from opforge.sandbox.situations import call_in_two_threads

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
