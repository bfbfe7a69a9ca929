"""Calls and references for the operators of sizes.py."""

import torch


def inputs():
    x = torch.randn(4, 32)
    names = ("only_whole_blocks", "writes_past_the_end", "reads_past_the_end", "pads_with_ones", "halves_the_rest")
    return {
        **{f"sizes::{name}": [((x,), {})] for name in names},
        "sizes::right": [((x,), {}), ((torch.arange(12).reshape(3, 4),), {})],
        "sizes::not_called_rightly": [((x, "up"), {})],
    }


def references():
    return {"sizes::pads_with_ones": lambda x: x.sum()}
