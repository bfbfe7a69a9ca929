"""Prompt templates of the package; a user's folder may replace each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jinja2

from opforge.backends.scaffold import python_signature
from opforge.cases import Case, Phase
from opforge.cases.case import Expect
from opforge.errors import OpforgeError
from opforge.generate.journal import AttemptVerdict
from opforge.generate.options import DSLS
from opforge.generate.tasks import AtenTask, CustomTask, Task, call_text, sample_cases, without_storage
from opforge.ops import table

BUILTIN_TEMPLATES = Path(__file__).parent / "prompts"
_MAX_CASES, _MAX_TIMED_CASES, _MAX_CASES_PER_OTHER = 16, 12, 3
_MAX_FEEDBACK_CHARS = 16_000
"""Maximum length of the feedback on one attempt."""


@dataclass(frozen=True, slots=True)
class EarlierAttempt:
    """An earlier attempt that was better, as templates use it."""

    words: str
    """Its rank: worker, round, how right, how fast."""
    source: str


class Prompts:
    """Renders the prompts for a model."""

    def __init__(self, folder: str, dsl: str, machine: Mapping[str, str | None]) -> None:
        user_loaders = [jinja2.FileSystemLoader(folder)] if folder else []
        self._templates = jinja2.Environment(
            loader=jinja2.ChoiceLoader([*user_loaders, jinja2.FileSystemLoader(BUILTIN_TEMPLATES)]),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,  # noqa: S701  # Markdown for a model
        )
        self._templates.filters |= {"shorten": shorten, "call": without_storage}
        self._common = {"dsl": dsl, "suffix": DSLS[dsl], "machine": dict(machine)}

    def system_prompt(self, task: Task) -> str:
        """Return the system prompt."""
        return self._render("system.md.j2", task)

    def first_prompt(self, task: Task, worker: int = 1, workers: int = 1) -> str:
        """Return a worker's first prompt."""
        team = {"worker": worker, "workers": workers, "count": sum(len(part.cases) for part in task.parts)}
        if isinstance(task, CustomTask):
            return self._render("first_custom.md.j2", task, **_custom_values(task), **team)
        return self._render("first.md.j2", task, **_aten_values(task), **team)

    def feedback_prompt(
        self, task: Task, verdict: AttemptVerdict, attempts_left: int, best: EarlierAttempt | None
    ) -> str:
        """Return the feedback on a worker's last attempt, with the number of attempts left."""
        text = self._render("feedback.md.j2", task, left=attempts_left, best=best, **verdict.wire())
        return shorten(text, _MAX_FEEDBACK_CHARS)

    def _render(self, name: str, task: Task, **values: object) -> str:
        task_values = {"custom": isinstance(task, CustomTask), "authority": task.authority}
        try:
            template = self._templates.get_template(name)
            return template.render(**self._common, **task_values, task=task, entry=task.entry, **values).strip() + "\n"
        except jinja2.TemplateError as error:
            where = f"{error.filename}:{error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise OpforgeError(
                f"the prompt {name} cannot be rendered: {where}{type(error).__name__}: {error.message}; "
                "fix it in --prompts, or remove it there to use the default"
            ) from None


def _aten_values(task: AtenTask) -> dict[str, object]:
    """Return the template values for an ATen operator."""
    required = {part.op: part.cases for part in task.parts if part.required}
    others = {part.op: part.cases for part in task.parts if not part.required}
    forms = dict(required)
    own = forms.pop(task.operator.name, [])
    timed = [case for group in (own, *forms.values()) for case in group]
    return {
        "op": task.operator,
        "signature": python_signature(task.operator),
        "schemas": {op: _schema(op) for op in (task.operator.name, *required)},
        "others": {op: _schema(op) for op in others},
        "cases": [*_case_lines(own, Phase.CORRECTNESS, _MAX_CASES), *_other_case_lines({**forms, **others})],
        "races": _case_lines(own, Phase.PERFORMANCE, _MAX_TIMED_CASES)
        or _case_lines(timed, Phase.PERFORMANCE, _MAX_TIMED_CASES),
    }


def _custom_values(task: CustomTask) -> dict[str, object]:
    """Return the template values for a user's operator."""
    cases = [case for part in task.parts for case in part.cases]
    return {
        "op": task.name,
        "signature": task.signature,
        "sources": task.sources,
        "cases": _case_lines(cases, Phase.CORRECTNESS, _MAX_CASES),
        "races": _case_lines(cases, Phase.PERFORMANCE, _MAX_TIMED_CASES),
    }


def shorten(text: str, max_chars: int) -> str:
    """Return a text, with its middle cut out if it is too long."""
    if len(text) <= max_chars:
        return text
    head = max_chars * 2 // 3
    return f"{text[:head]}\n[… {len(text) - max_chars} characters omitted …]\n{text[len(text) - (max_chars - head) :]}"


def _schema(op: str) -> str:
    operator = table().get(op)
    return operator.schema if operator is not None else op


def _case_lines(cases: list[Case], phase: Phase, max_cases: int) -> list[str]:
    return [_line(case) for case in sample_cases([c for c in cases if c.phase is phase], max_cases)]


def _other_case_lines(others: Mapping[str, list[Case]]) -> list[str]:
    return [line for cases in others.values() for line in _case_lines(cases, Phase.CORRECTNESS, _MAX_CASES_PER_OTHER)]


def _line(case: Case) -> str:
    """Return a case as a line of a prompt."""
    return f"{case.op}{call_text(case)}" + ("  # ATen raises an error" if case.expect is Expect.RAISES else "")
