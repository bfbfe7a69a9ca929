"""Kernels that leave a mark, and nothing left enabled."""

from __future__ import annotations

import pytest

import opforge


@pytest.fixture(autouse=True)
def out_again():
    yield
    opforge.disable()


@pytest.fixture
def kernels(tmp_path):
    """Return a function that writes kernels; each adds its mark to its answers, so that one sees who answered."""

    def write(sources, mark=1000, folder="kernels"):
        root = tmp_path / folder
        for op, source in sources.items():
            (root / op).mkdir(parents=True, exist_ok=True)
            (root / op / f"{op}_implementation_1.py").write_text(source.replace("MARK", str(mark)))
        return root

    return write
