"""A model that calls every operator of the folder, with and without what may be missing."""

import ops  # noqa: F401  # registers the operators
import torch


class Model(torch.nn.Module):
    def forward(self, x, y):
        rich = torch.ops.rich_ops
        first = rich.affine(x, 0.5, y, "relu")
        second = rich.affine(x, 3)
        total = rich.weighted_sum([x, first, second], [2, -1, 3])
        least, largest = rich.row_range(total)
        column, _ = rich.row_range(first, True)
        return total, least, largest, column


def model():
    return Model()


def inputs(rows=4):
    torch.manual_seed(rows)
    return torch.randn(rows, 6), torch.randn(rows, 6)


def cases():
    """Return inputs of several shapes; the model is exported and run for each."""
    return [inputs(), inputs(1), (torch.randn(2, 3, 5), torch.randn(2, 3, 5))]


def dynamic():
    """Return which dimensions may vary, and from where to where: one program serves all of these sizes."""
    return {"x": {0: (1, 16)}, "y": {0: (1, 16)}}
