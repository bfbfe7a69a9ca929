"""Prompts: which cases of an operator they show."""

from __future__ import annotations

from opforge.cases import Case, Phase
from opforge.generate.prompting import Prompts
from opforge.generate.tasks import aten_tasks
from opforge.runtime.devices import cpu_name
from opforge.suites import LoadedSuite


def test_a_prompt_shows_the_operators_own_cases_first_and_the_cpus_name():
    calls = [f"((T([{size}], f32),), {{}})" for size in range(1, 9)]
    forms = ("relu.default", "relu_.default")  # with equal arguments
    cases = {op: [Case.make(op, call) for call in calls] for op in forms}
    cases["relu.default"].append(Case.make("relu.default", calls[0], phase=Phase.PERFORMANCE))
    (task,) = aten_tasks(LoadedSuite("s", cases))
    machine = {"device": "cpu", "name": cpu_name(), "python": "3", "torch": "2", "triton": None}
    prompt = Prompts("", "pytorch", machine).first_prompt(task)
    judged, timed = prompt.split("Once it is right")
    assert [line for line in judged.splitlines() if line.startswith("relu")] == [
        *(f"relu.default{call}" for call in calls),
        *(f"relu_.default{calls[index]}" for index in (0, 4, 7)),
    ]
    assert f"relu.default{calls[0]}" in timed
    assert f"It runs on cpu ({cpu_name()})" in prompt
