"""A model that uses my_ops::mul4."""

import ops  # noqa: F401  # loads the library that registers the operator
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.ops.my_ops.mul4(x)


def model():
    return Model()


def inputs(rows=3):
    torch.manual_seed(rows)
    return (torch.randn(rows, 4),)
