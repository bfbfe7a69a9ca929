"""Honest kernels pass, however they are written, on every dtype, layout and value that ATen takes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.honest.judging import Honest, false_alarm, judge_all, kernels

CORPUS = kernels()


@pytest.fixture(scope="session")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return judge_all(CORPUS, tmp_path_factory.mktemp("honest"))


@pytest.mark.parametrize("kernel", CORPUS, ids=lambda k: k.name)
def test_an_honest_kernel_passes(kernel: Honest, verdicts: dict[str, list[dict[str, Any]]]) -> None:
    rows = verdicts[kernel.name]
    alarms = [(row["case"], row["verdict"], row["reason"]) for row in rows if false_alarm(kernel, row)]
    assert rows
    assert alarms == []


def test_the_corpus_is_broad() -> None:
    assert len(CORPUS) >= 32
    assert len({kernel.op for kernel in CORPUS}) >= 16
