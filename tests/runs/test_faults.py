"""Kernels that misbehave: each gets a verdict of its own, and everything else is judged."""

from __future__ import annotations

import os
import textwrap
import time
from collections import Counter

import psutil
import pytest

from opforge.reports.run_files import write_reports
from opforge.runs.execute import judge_pool
from tests.conftest import ROOT, UNARY, verdicts

HONEST = """
    import torch
    def {op}_kernel_impl(self):
        return torch.{op}(self)
"""
FAULTS = {
    "relu": """
        import os
        def relu_kernel_impl(self):
            os._exit(0)
    """,
    "abs": """
        import sys
        def abs_kernel_impl(self):
            sys.exit(0)
    """,
    "neg": """
        import ctypes
        def neg_kernel_impl(self):
            ctypes.string_at(0)
    """,
    "exp": """
        def exp_kernel_impl(self):
            while True:
                pass
    """,
    "sin": """
        def sin_kernel_impl(self):
            raise ValueError("not today")
    """,
    "cos": """
        def cos_kernel_impl(self):
            return {"answer": self}
    """,
    "tan": """
        import numpy
        def tan_kernel_impl(self):
            hoard = []
            while True:
                hoard.append(numpy.empty(64 << 20))
    """,
    "sqrt": """
        import sys, torch
        def sqrt_kernel_impl(self):
            for _ in range(200):
                sys.stdout.write("x" * 10000)
                sys.stderr.write("y" * 10000)
            sys.stdout.flush()
            return torch.sqrt(self)
    """,
    "floor": """
        import os, time, torch
        def floor_kernel_impl(self):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    time.sleep(600)
                os._exit(0)
            os.wait()
            return torch.floor(self)
    """,
    "ceil": HONEST.format(op="ceil"),
    "sigmoid": """
        def sigmoid_kernel_impl(self:
            return self
    """,
    "log": """
        def some_other_name(self):
            return self
    """,
    "log2": """
        def log2_kernel_impl():
            return None
    """,
    "trunc": """
        raise ImportError("a library that is not here")
    """,
    "round": """
        import torch
        def round_kernel_impl(self):
            torch.set_default_dtype(torch.float64)
            return torch.round(self)
    """,
    "erf": """
        import torch
        def erf_kernel_impl(self):
            return torch.erf(self).double()
    """,
    "sign": """
        def sign_kernel_impl(self):
            return self
    """,
    "asin": """
        import os
        os._exit(0)
    """,
    "atan": """
        import torch
        def atan_kernel_impl(self):
            raise NotImplementedError("only on Tuesdays")
    """,
    "sinh": """
        import torch
        calls = [0]
        def sinh_kernel_impl(self):
            calls[0] += 1
            return torch.sinh(self) + (calls[0] % 2 == 0)
    """,
    "cosh": """
        import os
        def cosh_kernel_impl(self):
            for fd in range(3, 64):
                try:
                    os.write(fd, b"\\x02\\x00\\x00\\x00{}")
                except OSError:
                    pass
            return self
    """,
    "tanh": """
        def tanh_kernel_impl(self):
            raise RuntimeError("\\ud800 and more")
    """,
    "log1p": """
        import os
        def log1p_kernel_impl(self):
            os.kill(os.getpid(), 40)
    """,
    "erfc": """
        import os, sys
        def erfc_kernel_impl(self):
            sys.stderr.write("RuntimeError: CUDA error: an illegal memory access was encountered\\n")
            sys.stderr.write("CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace might be incorrect.\\n")
            sys.stderr.write("For debugging consider passing CUDA_LAUNCH_BLOCKING=1\\nCompile with `TORCH_USE_CUDA_DSA` .\\n\\n")
            sys.stderr.flush()
            os._exit(3)
    """,
    "expm1": """
        import opforge.sandbox.guest.worker as worker
        worker.Worker._load = lambda self, description: 5
        worker.Worker._call_all = lambda self, request: {"results": [{"returned": {"T": [1, 2]}, "inputs": 5} for _ in request["cases"]]}
        def expm1_kernel_impl(self):
            return self
    """,
    "sqrt_": """
        import opforge.sandbox.guest.worker as worker
        worker.Worker._call_all = lambda self, request: {"results": [{"returned": 3, "inputs": [7, []]} for _ in request["cases"]]}
        def sqrt__kernel_impl(self):
            return self
    """,
}  # fmt: skip
EXPECTED = {
    "relu": ("crashed", "exited with status 0"),
    "abs": ("crashed", "SystemExit(0)"),
    "neg": ("crashed", "SIGSEGV"),
    "exp": ("timed_out", "no answer within 2 s"),
    "sin": ("error", "ValueError: not today"),
    "cos": ("contract", "builtins.dict"),
    "tan": ("error", "MemoryError"),
    "sqrt": ("passed", ""),
    "floor": ("cheated", "process(es) running"),
    "ceil": ("passed", ""),
    "sigmoid": ("error", "SyntaxError"),
    "log": ("error", "does not define log_kernel_impl"),
    "log2": ("error", "takes 0 positional arguments but 1 was given"),
    "trunc": ("error", "a library that is not here"),
    "round": ("contract", "default_dtype"),
    "erf": ("contract", "dtype f64"),
    "sign": ("contract", "`self` itself"),
    "asin": ("crashed", "while loading"),
    "atan": ("unsupported", "only on Tuesdays"),
    "sinh": ("contract", "the second time"),
    "cosh": ("contract", "reply is malformed"),
    "tanh": ("error", "and more"),
    "log1p": ("crashed", "a real-time signal (signal 40)"),
    "erfc": (
        "crashed",
        "with status 3; last output: RuntimeError: CUDA error: an illegal memory access was encountered",
    ),
    "expm1": ("cheated", "replaced opforge.sandbox.guest.worker.Worker._load"),
    "sqrt_": ("cheated", "replaced opforge.sandbox.guest.worker.Worker._call_all"),
}


@pytest.mark.own_server
def test_each_fault_is_its_own_verdict(kernel_directory, judge_tiny, tmp_path, still_running):
    root = kernel_directory(FAULTS)
    broken = root / "log10"
    broken.mkdir()
    (broken / "log10_implementation_1.py").symlink_to(tmp_path / "nowhere.py")
    ops = [*FAULTS, "log10"]
    begun = time.monotonic()
    ended = judge_tiny(root, {f"{op}.default": UNARY for op in ops}, timeout_s=2.0, memory_gib=1.0, allow_fallback=True)
    found = verdicts(ended)
    for op, (verdict, words) in (EXPECTED | {"log10": ("error", "cannot be read")}).items():
        assert any(v == verdict and words in reason for v, reason in found[f"{op}.default"]), (
            op,
            found[f"{op}.default"],
        )
        if verdict != "passed":
            assert "passed" not in {v for v, _ in found[f"{op}.default"]} or op == "sinh"
    rows = list(ended.store.rows())
    assert len(rows) == len(ops) * len(UNARY)
    write_reports(ended.store.path, ended.summary)
    assert time.monotonic() - begun < 120
    assert ended.summary.exit_code == 1
    assert still_running() == []


@pytest.mark.own_server
def test_nothing_is_left_running(judge_tiny, kernel_directory):
    before = set(psutil.Process(os.getpid()).children(recursive=True))
    root = kernel_directory({"relu": FAULTS["exp"].replace("exp", "relu")})
    judge_tiny(root, {"relu.default": UNARY[:1]}, timeout_s=1.0)
    assert set(psutil.Process(os.getpid()).children(recursive=True)) <= before


@pytest.mark.own_server
def test_what_a_kernel_started_ends_with_the_run(judge_tiny, kernel_directory, still_running):
    source = """
        import os, subprocess, torch
        children = []
        def relu_kernel_impl(self):
            if len(children) < 20:
                children.append(subprocess.Popen(["sleep", "600"]))
            assert children[-1].poll() is None
            return torch.where(self <= 0, 0, self)
    """
    ended = judge_tiny(kernel_directory({"relu": source}), {"relu.default": UNARY[:1]})
    assert verdicts(ended)["relu.default"] == {("passed", "")}
    assert still_running() == []


def test_a_crash_costs_one_case_and_not_its_neighbours(kernel_directory, judge_tiny):
    source = textwrap.dedent("""
        import os, torch
        def relu_kernel_impl(self):
            if self.dim() == 1:
                os.abort()
            return torch.where(self <= 0, 0, self)
    """)
    ended = judge_tiny(kernel_directory({"relu": source}), {"relu.default": UNARY})
    by_case = {row.case: row.verdict for row in ended.store.rows()}
    assert by_case == {UNARY[0]: "passed", UNARY[1]: "crashed", UNARY[2]: "passed"}


POOL = "((T([1, 1, 2, 2], f32), T([1, 1, 4, 4], f32), [2, 2], [2, 2], [0, 0], [1, 1], False, T([1, 1, 2, 2], i64{})), {{}})"


def test_atens_own_crash_is_blamed_on_aten(judge_tiny):
    """Indices far outside end PyTorch's own process: that case is lost, said to be ATen's, and the rest is judged."""
    crash = POOL.format(f", low={1 << 40}, high={(1 << 40) + 1}")
    cases = [POOL.format(""), crash, POOL.format(", high=4"), POOL.format(", low=4")]
    ended = judge_tiny(None, {"max_pool2d_with_indices_backward.default": cases})
    by_case = {row.case: (row.verdict, row.reason) for row in ended.store.rows()}
    assert by_case.pop(crash) == (
        "error",
        "ATen itself died of SIGSEGV (signal 11) on this case (the judge's process died, not the kernel's)",
    )
    assert {verdict for verdict, _ in by_case.values()} == {"passed"}
    assert len(by_case) == 3


@pytest.mark.own_server
def test_keys_do_not_reach_a_kernel(kernel_directory, judge_tiny, monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "secret")
    source = """
        import os, torch
        def relu_kernel_impl(self):
            if "secret" in "".join(os.environ.values()):
                raise RuntimeError("seen")
            return torch.where(self <= 0, 0, self)
    """
    ended = judge_tiny(kernel_directory({"relu": source}), {"relu.default": UNARY})
    assert {row.verdict for row in ended.store.rows()} == {"passed"}


def test_a_result_that_does_not_fit_in_memory_is_not_the_kernels_fault(judge_tiny):
    huge = "((T([1, 1], f32), [65536, 65536]), {})"
    small = "((T([1, 4], f32), [3, 4]), {})"
    found = verdicts(judge_tiny(None, {"expand.default": [huge, small]}))["expand.default"]
    why = "the case cannot be made here: its results take more than the 1073741824 bytes that a worker's arena has for them"
    assert found == {("passed", ""), ("unsupported", why)}


@pytest.mark.slow
def test_a_kernel_that_hangs_costs_three_time_limits(kernel_directory, judge_tiny):
    """Whatever operators it serves, and however many cases they have."""
    source = "import time\ndef relu_kernel_impl(self):\n    time.sleep(600)\n"
    cases = dict.fromkeys(("relu.default", "relu_.default"), UNARY)
    rows = list(judge_tiny(kernel_directory({"relu": source}), cases, timeout_s=2.0).store.rows())
    assert {row.verdict for row in rows} == {"timed_out"}
    assert Counter(row.reason.partition(":")[0] for row in rows) == {"no answer within 2 s": 3, "not run": 3}


@pytest.mark.slow
def test_a_kernel_that_is_slow_on_large_inputs_is_judged_on_the_others(kernel_directory, judge_tiny):
    """Though large variants of one batch take three time limits in all before one of them exceeds its own."""
    source = """
        import time
        import torch
        large = 0
        def relu_kernel_impl(self):
            global large
            if self.numel() > 50_000:
                large += 1
                time.sleep(1.7 if large < 3 else 60)
            return torch.where(self <= 0, 0, self)
    """
    rows = list(judge_tiny(kernel_directory({"relu": source}), {"relu.default": UNARY}, timeout_s=2.0).store.rows())
    assert {(row.verdict, row.reason) for row in rows} == {("passed", "")}
    assert not any("long_rows" in row.variants for row in rows)


@pytest.mark.own_server
def test_a_kernel_that_kills_its_judge_is_to_blame_and_not_aten(kernel_directory, judge_tiny, monkeypatch):
    monkeypatch.setitem(judge_pool.ROLES, "judge", "tests.runs.fragile_judge:serve")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    source = "import torch\ndef relu_kernel_impl(self):\n    return torch.where(self <= 0, 0, self)\n"
    found = verdicts(judge_tiny(kernel_directory({"relu": source}), {"relu.default": UNARY}))
    ((verdict, reason),) = found["relu.default"]
    assert verdict == "crashed"
    assert (
        reason
        == "the judge's process died of SIGBUS (signal 7) while it judged this kernel; with ATen alone it does not"
    )
