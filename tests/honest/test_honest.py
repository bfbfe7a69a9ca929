"""Honest kernels pass, however they are written, on every dtype, layout and value that ATen takes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.honest.judging import Honest, false_alarm, judge_all, kernels

CORPUS = kernels()
SOME = list({kernel.op: kernel for kernel in CORPUS}.values())[::3]
"""A kernel of every third operator; the others are judged in the slow set."""
OTHERS = [kernel for kernel in CORPUS if kernel not in SOME]

Rows = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="session")
def some(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    return judge_all(SOME, tmp_path_factory.mktemp("honest"))


@pytest.fixture(scope="session")
def others(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    return judge_all(OTHERS, tmp_path_factory.mktemp("honest"))


@pytest.mark.parametrize("kernel", SOME, ids=lambda k: k.name)
def test_an_honest_kernel_passes(kernel: Honest, some: Rows) -> None:
    check(kernel, some)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", OTHERS, ids=lambda k: k.name)
def test_the_other_honest_kernels_pass(kernel: Honest, others: Rows) -> None:
    check(kernel, others)


def check(kernel: Honest, verdicts: Rows) -> None:
    rows = verdicts[kernel.name]
    alarms = [(row.case, row.verdict, row.reason) for row in rows if false_alarm(kernel, row)]
    assert rows
    assert alarms == []


def test_the_corpus_is_broad() -> None:
    assert len(CORPUS) >= 32
    assert len({kernel.op for kernel in CORPUS}) >= 16
