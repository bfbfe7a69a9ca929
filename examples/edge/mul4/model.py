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


def cases():
    """Return inputs of several shapes and dtypes; the model is exported and run for each."""
    whole = torch.arange(-6, 6).reshape(3, 4)
    return [inputs(), (torch.randn(2, 3, 5),), (torch.tensor(1.5),), (whole.int(),), (whole,)]


def dynamic():
    """Return which dimensions may vary, and from where to where: one program serves all of these sizes."""
    return {"x": {0: (1, 16)}}
