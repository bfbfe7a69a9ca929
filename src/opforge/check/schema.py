"""Check that an operator writes only to declared arguments and returns new memory."""

from __future__ import annotations

from typing import Any

import torch

from opforge.check.differences import first_difference
from opforge.check.findings import KIND_CONTENTS, Finding, Findings, failed, note
from opforge.check.operator_call import copy_with_layout, flat_results
from opforge.check.subject import Subject

MAX_CALLS = 4


def check(subject: Subject) -> Findings:
    """Yield undeclared mutations, returned aliases, and declared mutations that never happen."""
    seen: set[str] = set()
    untouched = set(subject.written_arguments)
    for call in subject.calls[:MAX_CALLS]:
        call_copy = call.copy()
        before = {name: _snapshot(value) for name, value in subject.arguments_by_name(call_copy).items()}
        with torch.no_grad():
            results = subject.results(call_copy)
        after = subject.arguments_by_name(call_copy)
        for name, value in after.items():
            change = _describe_change(before[name], flat_results(value))
            untouched -= {name} if change else set()
            if change and name not in subject.written_arguments and f"write {name}" not in seen:
                seen.add(f"write {name}")
                yield failed(
                    "schema",
                    f"it writes to {name}, and the schema does not say so: {change}, after {subject.base_name}{call}",
                    _mutation_fix(subject, name),
                    KIND_CONTENTS,
                )
        for text, name in _undeclared_aliases(subject, results, after):
            if text not in seen:
                seen.add(text)
                yield failed("schema", f"{text}, after {subject.base_name}{call}", _alias_fix(subject, name))
    for name in sorted(untouched):
        yield note("schema", f"the schema says that {name} is written to, and no call changed it")


def _snapshot(value: Any) -> list[Any]:
    return [copy_with_layout(t) if isinstance(t, torch.Tensor) else t for t in flat_results(value)]


def _describe_change(before: list[Any], after: list[Any]) -> str:
    for old, new in zip(before, after, strict=True):
        if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
            if old.shape != new.shape or old.stride() != new.stride():
                return f"its shape is {list(new.shape)} instead of {list(old.shape)}"
            if message := first_difference([old], [new]):
                return message
    return ""


def _storage(t: Any) -> int:
    if isinstance(t, torch.Tensor) and t.layout == torch.strided and t.untyped_storage().nbytes():
        return int(t.untyped_storage().data_ptr())
    return 0


def _undeclared_aliases(subject: Subject, results: list[Any], named: dict[str, Any]) -> list[tuple[str, str]]:
    """Return messages about undeclared aliases of results, each with the argument's name."""
    allowed = [r.alias_info is not None for r in subject.returns]
    messages: list[tuple[str, str]] = []
    for index, result in enumerate(results):
        if index < len(allowed) and allowed[index]:
            continue
        which = "the result" if len(results) == 1 else f"result {index}"
        storage = _storage(result)
        shared = [
            name for name, value in named.items() if storage and storage in {_storage(t) for t in flat_results(value)}
        ]
        messages += [(f"{which} shares memory with {name}, and the schema does not say so", name) for name in shared]
        twins = [other for other in range(index) if storage and storage == _storage(results[other])]
        messages += [(f"{which} shares memory with result {other}", "") for other in twins]
    return messages


def alias_refused_by_torch(subject: Subject) -> Finding:
    """Return the finding for an operator that torch refuses to call because it returns an input."""
    name = next((a.name for a in subject.arguments if "Tensor" in str(a.type)), "x")
    return failed(
        "schema",
        "a result shares memory with an argument or with another result, and torch refuses every call",
        _alias_fix(subject, name),
    )


def _mutation_fix(subject: Subject, name: str) -> str:
    if subject.definition is not None:
        return (
            f'say so: mutates_args=("{name}",) in torch.library.custom_op; or work on a copy: {name} = {name}.clone()'
        )
    return f'say so in the schema: "{with_write_mark(subject, name)}"; or work on a copy: {name} = {name}.clone()'


def with_write_mark(subject: Subject, name: str) -> str:
    """Return the schema with one argument marked as written to."""
    text = str(subject.overload._schema)  # noqa: SLF001
    return text.replace(f"Tensor {name}", f"Tensor(a!) {name}", 1)


def _alias_fix(subject: Subject, name: str) -> str:
    which = name or "the argument"
    if subject.mutates:
        return (
            "return nothing of what was written: the schema ends in `-> ()`, and the Python function around the "
            f"operator returns {which}"
        )
    views = f"a view such as {which}[…] or {which}.reshape(…) shares memory too"
    return f"return memory of its own: {which}.clone(), also on paths where there is nothing to do; {views}"
