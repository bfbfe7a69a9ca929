"""Launch plans on a GPU: the example kernels in Triton, replayed in all the ways in which ATen is called."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import opforge
from opforge.runtime import learning
from tests.runtime.random_calls import RandomCalls

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU is missing; it runs on the GPU host"),
]
KERNELS = Path(__file__).parents[2] / "examples" / "triton_kernels"
OPS = ["add", "gelu", "native_layer_norm", "relu", "mul", "_softmax", "gelu_backward"]


@pytest.fixture
def enabled():
    with opforge.enabled(KERNELS, device="cuda", policy="all", ops=OPS, learn="request") as made:
        yield made


def work(x):
    return torch.relu(functional.gelu(x) + x)


def replayed(made):
    return sum(c.get("replayed", 0) for c in made.counters().values())


def random(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.float16)


def learn(made, *shape):
    work(random(*shape))
    made.learn()


def test_replays_equal_the_kernels_bit_for_bit(enabled):
    generator = torch.Generator().manual_seed(0)
    calls = []
    for _ in range(6):
        rows, columns = (int(torch.randint(1, 300, (), generator=generator)) for _ in range(2))
        base = random(rows + 1, columns + 3)
        for view in (base, base[1:], base[:, 1:], base[:, 3:].contiguous(), base.t()):
            calls += [
                lambda v=view: torch.add(v, v),
                lambda v=view: torch.mul(v, 0.5),
                lambda v=view: functional.gelu(v),
            ]
            calls += [lambda v=view: torch.softmax(v, -1), lambda v=view: torch.add(v, v[:1])]
    expected = [call() for call in calls]
    enabled.learn()
    before = replayed(enabled)
    for call, result in zip(calls, expected, strict=True):
        now = call()
        assert torch.equal(now.view(torch.int16), result.view(torch.int16))
        assert now.stride() == result.stride()
    assert replayed(enabled) - before > len(calls) // 3


@pytest.mark.parametrize(
    ("calls", "pool", "rounds"), [(20_000, 100, 2), pytest.param(1_000_000, 400, 20, marks=pytest.mark.slow)]
)
def test_replays_of_random_calls_equal_the_kernels_bit_for_bit(monkeypatch, calls, pool, rounds):
    monkeypatch.setattr(learning, "_ALL_NOTED", pool)
    ops = ["add", "mul", "gelu", "relu", "silu", "sigmoid", "_softmax", "native_layer_norm"]
    random_calls = RandomCalls(KERNELS, ops, seed=24, size=pool, device="cuda", dtype=torch.float16)
    with opforge.enabled(KERNELS, device="cuda", policy="all", ops=ops, learn="request") as made:
        random_calls.learn(made)
        assert len(random_calls.calls) > pool // 2  # kernels copy tensors with gaps, for which there are no plans
        before = replayed(made)
        assert random_calls.run(calls, rounds) == ""
        assert replayed(made) == before + calls


def test_a_graph_is_captured_with_replays(enabled):
    x = random(64, 256)
    learn(enabled, 64, 256)
    before = replayed(enabled)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work(x)
    assert replayed(enabled) == before + 3
    x.copy_(random(64, 256))
    graph.replay()
    assert torch.equal(result, work(x))


def test_learning_in_a_capture_is_refused(enabled):
    work(random(64, 256))
    graph = torch.cuda.CUDAGraph()
    x = random(8)
    with torch.cuda.graph(graph):
        x.add_(1)
        with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
            enabled.learn()


def test_streams_and_threads(enabled):
    learn(enabled, 64, 256)
    wrong = []

    def repeat(number):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(200):
                x = torch.full((64, 256), number / 8, device="cuda", dtype=torch.float16)
                result = work(x)
                if not bool((result == result[0, 0]).all()):
                    wrong.append(number)

    threads = [threading.Thread(target=repeat, args=(n,)) for n in range(8)]
    before = replayed(enabled)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert replayed(enabled) == before + 8 * 200 * 3


def test_nested_streams_wait_for_each_other(enabled):
    """A replay is launched on the stream of its call, so what waits for the stream waits for the replay."""
    learn(enabled, 512, 512)
    x, before = random(512, 512), replayed(enabled)
    expected = work(work(work(x)))
    outer, inner = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(50):
        outer.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(outer):
            first = work(x)
            inner.wait_stream(outer)
            with torch.cuda.stream(inner):
                second = work(first)
            outer.wait_stream(inner)
            third = work(second)
        torch.cuda.current_stream().wait_stream(outer)
        assert torch.equal(third, expected)
        for tensor, stream in ((first, inner), (second, outer), (third, torch.cuda.current_stream())):
            tensor.record_stream(stream)
    assert replayed(enabled) == before + 3 * (3 + 50 * 3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU only")
def test_another_device_has_plans_of_its_own(enabled):
    learn(enabled, 64, 256)
    before = replayed(enabled)
    x = random(64, 256)
    there = x.to("cuda:1")
    assert torch.equal(work(there).cpu(), work(x).cpu())
    assert replayed(enabled) == before + 3
    enabled.learn()
    assert work(there).device == there.device
    assert replayed(enabled) == before + 6


def test_a_backward_pass_replays_in_its_own_thread(enabled):
    leaf = random(64, 256).requires_grad_()
    weight = random(64, 256)

    def gradient():
        leaf.grad = None
        (functional.gelu(leaf) * weight).backward(torch.ones_like(weight))
        return leaf.grad.clone()

    expected = gradient()
    report = enabled.learn()
    assert report["gelu_backward.default"]["plans"] == 1
    assert torch.equal(gradient(), expected)
    assert enabled.counters()["gelu_backward.default"]["replayed"] == 1


def test_memory_that_runs_out_is_torchs_own_error(enabled):
    learn(enabled, 64, 256)
    x = random(64, 256)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            kept = [work(x) for _ in range(100_000)]
        kept = []
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert not kept
    assert torch.equal(work(x), work(x))


@pytest.mark.parametrize("learn_when", ["background", "request", "never"])
def test_the_process_ends_as_usual(learn_when):
    program = (
        "import sys, time, torch, opforge\n"
        "made = opforge.enable(sys.argv[1], device='cuda', policy='all', ops=['gelu'], learn=sys.argv[2])\n"
        "x, limit = torch.ones(64, device='cuda'), time.monotonic() + 60\n"
        "while time.monotonic() < limit:\n"
        "    torch.nn.functional.gelu(x)\n"
        "    if sys.argv[2] == 'request': made.learn()\n"
        "    if sys.argv[2] == 'never' or made.counters()['gelu.default'].get('replayed'): break\n"
        "print('replayed' in made.counters()['gelu.default'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(KERNELS), learn_when], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{learn_when != 'never'}\n"), done.stderr


def test_in_place_and_out_variants_with_copies_are_replayed():
    """Their kernels' results are copied to the target; views with gaps are copied by ATen."""
    with opforge.enabled(KERNELS, device="cuda", policy="all", learn="request") as made:
        for planned in (False, True):
            value, other, out = random(64, 128), random(64, 128), random(128, 64).t()
            expected = torch.relu(value)
            torch.ops.aten.relu.out(value, out=out)
            torch.relu_(value)
            before = value.clone()
            value.add_(other)
            assert torch.equal(out, expected)
            assert torch.equal(before, expected)
            assert value._version == 2
            torch.testing.assert_close(value, (before.float() + other.float()).half())
            made.learn()
            counters = made.counters()
            for op in ("relu_.default", "relu.out", "add_.Tensor"):
                assert counters[op].get("replayed", 0) == planned, op
