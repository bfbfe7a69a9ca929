"""Inputs of scaled_add(x, y, scale): x + scale * y, with broadcasting."""

import torch

from opforge import Test


def get_correctness_tests():
    return [
        Test(lambda: torch.randn(16, 33), lambda: torch.randn(16, 33), scale=lambda: 0.5),
        Test(lambda: torch.randn(7, 1), lambda: torch.randn(5), scale=-2.0),
        Test(lambda: torch.randn(64, dtype=torch.bfloat16), lambda: torch.randn(64, dtype=torch.bfloat16), scale=3.0),
        Test(lambda: torch.randint(-9, 9, (4, 4)), lambda: torch.randint(-9, 9, (4, 4)), scale=2),
    ]


def get_performance_tests():
    return [Test(lambda: torch.randn(512, 512), lambda: torch.randn(512, 512), scale=0.5)]
