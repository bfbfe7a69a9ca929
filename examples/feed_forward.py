"""A feed-forward block made of operators of the package my_ops (docs/authoring.md makes it), compiled as one graph and compared with plain PyTorch."""

import my_ops
import torch
from torch import Tensor, nn
from torch.nn import functional

SIZE, INNER = 64, 96


class FeedForward(nn.Module):
    """What stands in a language model after attention: a norm, a gated layer, a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(SIZE) + 0.5)
        self.into = nn.Linear(SIZE, 2 * INNER, bias=False)
        self.back = nn.Linear(INNER, SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.into(self.norm(x)).chunk(2, dim=-1)
        return x + self.back(self.gated(gate, up))

    def norm(self, x: Tensor) -> Tensor:
        return my_ops.rms_norm(x, self.weight)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return my_ops.swiglu(gate, up)


class Plain(FeedForward):
    """The same in PyTorch's own operators."""

    def norm(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (SIZE,), self.weight, eps=1e-6)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate) * up


def outcome(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the result and the gradients of all parameters."""
    result = model(x)
    return [result, *torch.autograd.grad(result.square().mean(), list(model.parameters()))]


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ours, plain = FeedForward().to(device), Plain().to(device)
    plain.load_state_dict(ours.state_dict())
    compiled = torch.compile(ours, fullgraph=True, dynamic=True)
    for tokens in (5, 32):
        x = torch.randn(2, tokens, SIZE, device=device)
        pairs = zip(outcome(compiled, x), outcome(plain, x), strict=True)
        away = max((one - other).abs().max().item() for one, other in pairs)
        if away > 1e-4:
            raise SystemExit(f"{tokens} tokens: results or gradients differ by {away:.1e}")
        print(f"{tokens:3} tokens: compiled whole on {device}; results and gradients are PyTorch's within {away:.1e}")


if __name__ == "__main__":
    main()
