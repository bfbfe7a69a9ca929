"""Inputs of swish(x). There is no reference: one of the implementations is used instead."""

import torch
from BackendBench.suite.base import Test


def get_correctness_tests():
    return [
        Test(lambda: torch.randn(33)),
        Test(lambda: torch.linspace(-20, 20, 200).reshape(10, 20)),
        Test(lambda: torch.randn(8, 3, 5)),
    ]


def get_performance_tests():
    return [Test(lambda: torch.randn(256, 1024))]
