import torch


def clamp_scale_reference(x, scale):
    return torch.clamp(x * scale, -1.0, 1.0)
