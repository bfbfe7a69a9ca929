"""Programs to be traced, with plain torch modules."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn


def inference():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5)
    ).eval()
    with torch.inference_mode():
        model(torch.randn(2, 3, 9, 9))


def training():
    """Three steps, yielding after each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        tokens = torch.randint(0, 50, (2, 6))
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def indexed():
    source = torch.arange(12.0).reshape(4, 3)
    source[torch.tensor([2, 0])]
    source.index_put_((torch.tensor([3, 1]),), torch.zeros(2, 3))
    torch.bucketize(torch.rand(5), torch.tensor([0.1, 0.5, 0.9]))
    source.index_select(1, torch.tensor([2, 2, 0]))
    torch.rsqrt(torch.rand(7) + 0.5)


def raises():
    torch.ones(3) + 1
    raise ValueError("the model is broken")


def dies():
    torch.ones(3) + 1
    os.kill(os.getpid(), signal.SIGSEGV)


def leaves():
    torch.ones(3) + 1
    raise SystemExit(3)


def many_numbers():
    for i in range(50):
        torch.ones(3).mul(1.0 + i / 7)


def own_operator():
    @torch.library.custom_op("opforge_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice(torch.ones(4))


def forks():
    child = os.fork()
    torch.ones(3).sigmoid()
    if child == 0:
        for _ in range(100):
            torch.ones(4).sigmoid()
        os._exit(0)
    os.waitpid(child, 0)


def everything():
    """All that comes to its end, in one process: starting one takes as long as importing torch."""
    inference()
    yield from training()
    indexed()
    many_numbers()
    own_operator()
    forks()


def asks():
    """Asks for a number, as a program that logs its loss does."""
    loss = torch.ones(3).sum()
    print(loss.item() > 0)
    loss.exp()


def hangs():
    torch.ones(3).cosh()
    while True:
        time.sleep(1)


def without_memory_once():
    """Finds no memory the first time, and some the second."""
    mark = Path(os.environ["OPFORGE_TEST_FOLDER"]) / "tried"
    torch.ones(3).tanh()
    if not mark.exists():
        mark.touch()
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
    torch.ones(3).exp()


def nothing():
    pass
