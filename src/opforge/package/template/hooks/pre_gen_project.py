"""The rules for the answers that a package is made of. As a script it holds the answers against them; `opforge new` imports it."""

from __future__ import annotations

import importlib.util
import json
import keyword
import re
import sys

ANSWERS = r"""{{ cookiecutter | tojson }}"""

VARIANTS = ("triton", "cpp")
ABIS = ("stable", "full")
OLDEST_TORCH = (2, 11)
MAX_NAME_LENGTH = 64

TORCH_NAMESPACES = frozenset(
    "aten prim prims rngprims debugprims quantized quantized_decomposed quantization mkl mkldnn mkldnn_prepacked onednn prepacked "
    "xnnpack vulkan vulkan_prepack metal metal_prepack sparse profiler inductor inductor_prims c10d c10d_functional symm_mem rpc "
    "static_runtime cuda onnx onnx_symbolic fsdp export flex_lib streams debug_mode_ops higher_order "
    "load_library loaded_libraries import_module".split()
)
"""Names that ``torch.ops`` has."""

KNOWN_NAMESPACES = frozenset(
    "image torchvision torchaudio torchao torchtext fbgemm detectron2 vllm flash_attn xformers executorch opforge".split()
)
"""Namespaces of packages that are often installed beside torch."""

RESERVED = frozenset(
    "torch triton numpy ops kernels namespace checks batching test tests src build dist csrc cmake variants benchmarks setup conftest support".split()
)
"""Names that mean something else here: an import or a folder of the package itself."""


def problem_with_package(name: str) -> str:
    """Return why a package cannot have this name; empty if it can."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        return f"package name {name!r} cannot be used: it must begin with a small letter and hold small letters, digits and underscores only, such as my_ops"
    if len(name) > MAX_NAME_LENGTH:
        return f"package name {name[:20] + '…'!r} is too long: it has {len(name)} characters and may have {MAX_NAME_LENGTH}; choose a shorter one"
    if keyword.iskeyword(name) or keyword.issoftkeyword(name):
        return f"package name {name!r} is a keyword of Python; choose another, such as {name}_ops"
    if name in sys.stdlib_module_names:
        return f"package name {name!r} is a module of Python's standard library; choose another, such as {name}_ops"
    if name in TORCH_NAMESPACES | KNOWN_NAMESPACES:
        return f"package name {name!r} is a namespace that torch or a well known package has already; choose another, such as my_{name}"
    if name in RESERVED:
        return f"package name {name!r} is reserved; choose another, such as my_{name}"
    if place := _importable(name):
        return f"package name {name!r} is taken: {place} is importable here; choose another, or uninstall that one first"
    return ""


def _importable(name: str) -> str:
    """Return where a module of this name is; a bare folder that merely lies in the way does not count."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return ""
    return spec.origin or name if spec is not None and spec.loader is not None and spec.origin else ""


def problem_with_torch(version: str) -> str:
    """Return why this cannot be the oldest torch."""
    oldest = ".".join(map(str, OLDEST_TORCH))
    if not re.fullmatch(r"\d+\.\d+", version):
        return f"torch version {version!r} cannot be used: give two numbers such as {oldest}"
    if tuple(map(int, version.split("."))) < OLDEST_TORCH:
        return f"torch version {version!r} is too old: {oldest} is the oldest that works"
    return ""


def problem_with_text(what: str, text: str) -> str:
    """Return why a line of text cannot be used in the files of a package."""
    if bad := sorted({c for c in text if c in "\"\\{}" or not c.isprintable()}):
        return f"{what} {text!r} cannot be used: it must be one line without {', '.join(map(repr, bad))}"
    return ""


def problem_with_choice(what: str, value: str, allowed: tuple[str, ...]) -> str:
    """Return why this is none of the choices."""
    return "" if value in allowed else f"unknown {what} {value!r}; allowed: {', '.join(allowed)}"


def problems(answers: dict[str, str]) -> list[str]:
    """Return the problems with the answers; empty if a package can be made of them."""
    description = answers["description"]
    found = [
        problem_with_package(answers["package"]),
        problem_with_choice("variant", answers["variant"], VARIANTS),
        problem_with_choice("abi", answers["abi"], ABIS),
        problem_with_text("description", description),
        "" if description.strip() else "the description is empty; say in a line what the package is for",
        problem_with_text("author", answers["author"]),
        problem_with_torch(answers["torch"]),
    ]
    return [problem for problem in found if problem]


if __name__ == "__main__":
    wrong = problems(json.loads(ANSWERS))
    for line in wrong:
        sys.stderr.write(f"{line}\n")
    sys.exit(1 if wrong else 0)
