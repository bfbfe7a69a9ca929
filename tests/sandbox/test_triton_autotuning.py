"""Triton's tuner in processes where nothing is timed."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs the package triton")
ASKS = """
import sys
from opforge.sandbox.guest.triton_autotuning import keep_short
keep_short()
assert "triton" not in sys.modules
import triton.testing
asked = []
triton.testing.do_bench = lambda function, warmup=25, rep=100, **options: asked.append((warmup, rep, options))
if "short" in sys.argv:
    keep_short()
    keep_short()
driver = triton.backends.backends["nvidia"].driver
driver.get_benchmarker(None)(print, quantiles=(0.5,))
driver.get_benchmarker(None)(print, 5, rep=7)
print(asked)
"""


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ([], "[(25, 100, {'quantiles': (0.5,)}), (5, 7, {})]"),
        (["short"], "[(1, 4, {'quantiles': (0.5,)}), (5, 7, {})]"),
    ],
)
def test_a_configuration_is_tried_for_a_moment_unless_the_kernel_says_for_how_long(words, asked):
    done = subprocess.run([sys.executable, "-c", ASKS, *words], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == asked, done.stderr
