"""``python -m BackendBench.scripts.create_watermarked_operators``: kernels that return a constant, in every folder.

They show which kernel answers a call; as kernels they are wrong.
"""

import argparse
import sys
import zlib
from pathlib import Path

from BackendBench.utils import op_name_to_folder_name

WATERMARK_BASE = 42.0
_KERNEL = '''"""Returns {value} everywhere, to show that this kernel answers."""

import torch


def {name}_kernel_impl(*args, **kwargs):
    first = next(a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor))
    return torch.full_like(first, {value})
'''


def get_operator_watermark_value(op_name: str, base_value: float = WATERMARK_BASE) -> float:
    """Return the constant of an operator: the base plus 0 to 99."""
    return base_value + zlib.crc32(op_name_to_folder_name(op_name).encode()) % 100


def create_watermarked_operators(
    base_dir: str | Path = "generated_kernels",
    watermark_value: float | None = None,
    overwrite: bool = False,
    use_unique_watermarks: bool = False,
) -> None:
    """Write a constant kernel into every folder, with one constant for all or one for each operator."""
    base = WATERMARK_BASE if watermark_value is None else watermark_value
    made = 0
    for folder in sorted(p for p in Path(base_dir).iterdir() if p.is_dir() and not p.name.startswith(("_", "."))):
        file = folder / f"{folder.name}_implementation_v1.py"
        if file.exists() and not overwrite:
            continue
        value = get_operator_watermark_value(folder.name, base) if use_unique_watermarks else base
        file.write_text(_KERNEL.format(name=folder.name, value=value), encoding="utf-8")
        made += 1
    sys.stdout.write(f"{made} watermarked kernels made under {base_dir}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-dir", default="generated_kernels", help="folder of the operators' folders")
    parser.add_argument("--watermark-value", type=float, help=f"the constant (default: {WATERMARK_BASE})")
    parser.add_argument("--overwrite", action="store_true", help="replace kernels of an earlier call")
    parser.add_argument("--unique-watermarks", action="store_true", help="a constant for each operator")
    options = parser.parse_args()
    if not Path(options.base_dir).is_dir():
        parser.error(
            f"there is no folder {options.base_dir!r}; make it with BackendBench.scripts.setup_operator_directories"
        )
    create_watermarked_operators(
        options.base_dir, options.watermark_value, options.overwrite, options.unique_watermarks
    )


if __name__ == "__main__":
    main()
