"""Both matrix products against PyTorch's own: shape, dtype and the largest difference. Build them first: opforge build examples/cpp_matmul."""

import sys
from pathlib import Path

import torch

BUILT = Path(__file__).resolve().parent / "build"
if not BUILT.is_dir():
    sys.exit(f"{BUILT} is not there; build the libraries first: opforge build {BUILT.parent}")
sys.path.insert(0, str(BUILT))

import matmul_blocked  # noqa: E402  # built just before
import matmul_naive  # noqa: E402

SHAPES = [(1, 1, 1), (3, 5, 7), (64, 64, 64), (130, 257, 33), (256, 512, 128), (0, 4, 3), (4, 0, 3)]
DTYPES = [torch.float32, torch.float64, torch.int64]


def matrix(rows, columns, dtype):
    if dtype.is_floating_point:
        return torch.randn(rows, columns, dtype=dtype)
    return torch.randint(-9, 10, (rows, columns), dtype=dtype)


def main():
    torch.manual_seed(0)
    wrong = 0
    print(f"{'library':16}{'shape':24}{'dtype':10}largest difference")
    for library in (matmul_naive, matmul_blocked):
        for rows, inner, columns in SHAPES:
            for dtype in DTYPES:
                a, b = matrix(rows, inner, dtype), matrix(inner, columns, dtype)
                ours, theirs = library.mm(a, b), torch.mm(a, b)
                difference = (ours - theirs).abs().max().item() if ours.numel() else 0
                allowed = 8 * inner**0.5 * torch.finfo(dtype).eps * inner if dtype.is_floating_point else 0
                right = ours.shape == theirs.shape and ours.dtype == theirs.dtype and difference <= allowed
                wrong += not right
                shape = f"{rows}x{inner} @ {inner}x{columns}"
                print(
                    f"{library.__name__:16}{shape:24}{str(dtype)[6:]:10}{difference:.3g}{'' if right else '   WRONG'}"
                )
    print("all equal within rounding" if not wrong else f"{wrong} differ")
    return wrong


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
