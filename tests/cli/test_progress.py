"""The rate and the remaining time that are shown beside a step."""

from __future__ import annotations

import re

from opforge.cli.progress import Pace, ProgressLine


def test_the_rate_is_that_of_the_last_minute():
    pace = Pace()
    assert pace.note(0, 1000, 0.0) == ""
    assert pace.note(10, 1000, 2.0) == ""  # too early to tell
    assert pace.note(40, 1000, 4.0) == "10/s, 1:36 left"
    for second in range(6, 200, 2):  # slower from here on
        text = pace.note(40 + (second - 4) // 2, 1000, float(second))
    assert text == "0.5/s, 28:46 left"
    assert pace.note(1000, 1000, 201.0) == ""


def test_another_step_has_a_rate_of_its_own():
    pace = Pace()
    pace.note(0, 100, 0.0)
    assert pace.note(50, 100, 10.0) == "5/s, 0:10 left"
    assert pace.note(0, 8000, 11.0) == ""
    assert pace.note(2, 8000, 21.0) == "0.2/s, 11:06:30 left"
    assert pace.note(2, 8000, 22.0) != ""
    assert pace.note(1, 8000, 23.0) == ""  # a step that starts again


def test_lines_name_the_operator_the_rate_and_the_remaining_time(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with ProgressLine() as progress:
        for number in range(4):
            progress("relu.default", 10 * number, 100)
            now[0] += 3.0
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(re.fullmatch(r"\d+/100 relu.default \(3.3/s, 0:\d\d left\)", line) for line in lines), lines
