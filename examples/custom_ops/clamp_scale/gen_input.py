"""Inputs of clamp_scale(x, scale), whose implementation is in C++."""

import torch

from opforge import Test


def get_correctness_tests():
    return [
        Test(lambda: torch.randn(33), lambda: 0.5),
        Test(lambda: torch.randn(7, 12, dtype=torch.float64), lambda: 3.0),
        Test(lambda: torch.linspace(-4, 4, 64).reshape(8, 8), lambda: -0.75),
    ]


def get_performance_tests():
    return [Test(lambda: torch.randn(256, 1024), lambda: 1.5)]
