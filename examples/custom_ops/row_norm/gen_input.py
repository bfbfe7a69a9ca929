"""Inputs of row_norm(x, eps): each row of a matrix divided by its root mean square."""

import torch

from opforge import Test


def get_correctness_tests():
    return [
        Test(lambda: torch.randn(4, 16), eps=lambda: 1e-6),
        Test(lambda: torch.randn(3, 37) * 8, eps=lambda: 1e-5),
        Test(lambda: torch.randn(2, 64, dtype=torch.float16), eps=lambda: 1e-3),
    ]


def get_performance_tests():
    return [Test(lambda: torch.randn(8, 512), eps=lambda: 1e-6)]
