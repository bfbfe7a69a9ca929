"""A process that has imported what later ones need, and forks them: answers, ends, limits, and what stays apart."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from opforge.procs.child import child_environment
from opforge.procs.preloaded import PreloadedProcess, PreloadError
from tests.procs.test_child import ends

FORKER = """
import os, signal, subprocess, sys, time
from opforge.procs.channel import Channel
from opforge.procs.child import message_pipe, send
from opforge.procs.preloaded import serve_forks

prepared = []

def prepare(question):
    if question == "end":
        print("no more", flush=True)
        os._exit(3)
    prepared.append(question)

def answer(question, fd):
    pipe = message_pipe(fd)
    exec(question)
    pipe.flush()
    os._exit(0)

serve_forks(Channel.from_fd(int(sys.argv[1])), prepare, answer)
"""


@pytest.fixture(scope="module")
def forker() -> Iterator[PreloadedProcess]:
    process = PreloadedProcess([sys.executable, "-c", FORKER], child_environment())
    yield process
    process.close()


def answers(forker: PreloadedProcess, question: str, limit_s: float = 60.0, **variables: str) -> tuple[list[Any], str]:
    """Return the messages of a fork, and how it ended."""
    with forker.ask(question, {**child_environment(), **variables}, limit_s=limit_s) as fork:
        return [message for message, _ in fork.messages()], fork.ending


def test_each_question_has_a_process_of_its_own_and_all_have_what_was_prepared(forker):
    question = "send(pipe, [os.getpid(), os.getppid(), len(prepared)])"
    ((one, parent, count),), ending = answers(forker, question)
    ((other, same_parent, next_count),), _ = answers(forker, question)
    assert (parent, next_count, ending) == (same_parent, count + 1, "exited with status 0")
    assert len({one, other, parent, os.getpid()}) == 4


def test_it_has_our_environment_and_folder_and_its_changes_reach_nobody(forker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    question = "send(pipe, [os.environ.get('GIVEN'), os.getcwd(), len(prepared) < 0]); os.environ['GIVEN'] = 'b'; os.chdir('/')"
    assert answers(forker, question, GIVEN="a")[0] == [["a", str(tmp_path), False]]
    assert answers(forker, question)[0] == [[None, str(tmp_path), False]]


@pytest.mark.parametrize(
    ("question", "ending"),
    [
        ("send(pipe, 1); pipe.flush(); os.kill(os.getpid(), signal.SIGSEGV)", "died of SIGSEGV (signal 11)"),
        ("send(pipe, 1); pipe.flush(); os._exit(4)", "exited with status 4"),
    ],
)
def test_an_end_is_described_and_the_next_question_is_answered(forker, question, ending):
    assert answers(forker, question) == ([1], ending)
    assert answers(forker, "send(pipe, 2)") == ([2], "exited with status 0")


def test_what_it_prints_is_its_own(forker):
    with forker.ask("print('printed', flush=True)", child_environment(), limit_s=60.0) as fork:
        assert list(fork.messages()) == []
        assert (fork.wait(), fork.output()) == (0, "printed\n")


def test_silence_is_limited_and_all_that_it_started_ends_with_it(forker):
    question = "send(pipe, [os.getpid(), subprocess.Popen(['sleep', '30']).pid]); pipe.flush(); time.sleep(300)"
    with forker.ask(question, child_environment(), limit_s=60.0) as fork:
        messages = fork.messages()
        pids, _ = next(messages)
        fork._limit_s = 0.5  # starting takes longer on a busy machine
        assert list(messages) == []
        assert (fork.wait(), fork.timed_out) == (-9, True)
    assert all(map(ends, pids))
    assert answers(forker, "send(pipe, 2)")[0] == [2]


def test_an_interrupt_ends_it_and_the_next_question_is_answered(forker):
    question = "send(pipe, os.getpid()); pipe.flush(); time.sleep(300)"
    with pytest.raises(KeyboardInterrupt), forker.ask(question, child_environment(), limit_s=60.0) as fork:
        pid, _ = next(fork.messages())
        raise KeyboardInterrupt
    assert ends(pid)
    assert forker.fits(child_environment())
    assert answers(forker, "send(pipe, 2)")[0] == [2]


def test_while_it_is_asked_it_is_not_free(forker):
    with forker.ask("time.sleep(300)", child_environment(), limit_s=60.0):
        assert not forker.fits(child_environment())
    assert forker.fits(child_environment())


def test_it_does_not_fit_other_settings_that_are_read_at_import(forker):
    assert forker.fits({**child_environment(), "ANYTHING": "1"})
    assert not forker.fits({**child_environment(), "TORCH_LOGS": "+dynamo"})


def test_its_own_end_is_told_with_what_it_printed_last():
    forker = PreloadedProcess([sys.executable, "-c", FORKER], child_environment())
    with pytest.raises(PreloadError, match=r"(?s)exited with status 3: .*no more"):
        answers(forker, "end")
    assert not forker.fits(child_environment())
    forker.close()
