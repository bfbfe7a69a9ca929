"""The machine's compilers, and the locations of torch's headers and libraries.

Torch is queried once, in a separate process.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opforge import cache
from opforge.errors import OpforgeError

OLDEST_TORCH = "2.11"
"""The oldest torch that opforge supports, and the default target of stable-ABI libraries."""
_LIMIT_S = 120.0
_CUDA_FOLDERS = ("/usr/local/cuda", "/opt/cuda")
_QUERY_SCRIPT = """
import json, torch
from torch.utils import cpp_extension as e
cuda = e.CUDA_HOME is not None
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "path": torch.__path__[0],
    "include": e.include_paths("cuda" if cuda else "cpu"), "library": e.library_paths("cuda" if cuda else "cpu"),
    "cxx11_abi": bool(torch._C._GLIBCXX_USE_CXX11_ABI), "nvcc_flags": list(e.COMMON_NVCC_FLAGS),
}))
"""


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """Build settings of the installed torch."""

    version: str
    cuda: str | None
    """The CUDA version it was built with; None for a build without CUDA."""
    path: str
    include_folders: tuple[str, ...]
    library_folders: tuple[str, ...]
    cxx11_abi: bool
    nvcc_flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler and the first line of its version output."""

    path: str
    version: str


@functools.cache
def torch_build() -> TorchBuild:
    """Return the installed torch's build settings, queried once per installation and cached."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise OpforgeError("there is no torch in this Python to build for; install it with `pip install torch`")
    cuda = f"{os.environ.get('CUDA_HOME')}\n{os.environ.get('CUDA_PATH')}"
    identity = f"{cache.torch_version()}\n{spec.origin}\n{sys.version}\n{cuda}"
    path = cache.root() / "native" / f"torch-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"
    facts: dict[str, Any] | None = cache.read_json(path)
    if facts is None or not Path(facts["include"][0]).is_dir():
        facts = _query_torch()
        cache.write_atomically(path, json.dumps(facts))
    return TorchBuild(
        facts["version"], facts["cuda"], facts["path"], tuple(facts["include"]), tuple(facts["library"]),
        facts["cxx11_abi"], tuple(facts["nvcc_flags"]),
    )  # fmt: skip


def _query_torch() -> dict[str, Any]:
    completed = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", _QUERY_SCRIPT],
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    if completed.returncode:
        raise OpforgeError(
            f"torch cannot say where its headers are; importing it ended with: {completed.stderr.strip()[-500:]}"
        )
    facts: dict[str, Any] = json.loads(completed.stdout.splitlines()[-1])
    return facts


def cxx() -> Compiler:
    """Return the C++ compiler: ``$CXX``, else the first of c++, g++ and clang++ on the PATH."""
    named = os.environ.get("CXX")
    for name in [named] if named else ["c++", "g++", "clang++"]:
        if (path := shutil.which(name)) is not None:
            return Compiler(path, _version(path))
    problem = (
        f"CXX names {named!r}, which is not there"
        if named
        else "there is no C++ compiler on the PATH (c++, g++ or clang++)"
    )
    raise OpforgeError(f"{problem}; install one, for example with `apt install g++`, or set CXX to its path")


def nvcc() -> Compiler:
    """Return CUDA's compiler, nvcc.

    Looks in ``$CUDA_HOME`` and ``$CUDA_PATH``, then on the PATH, then in the usual places.
    """
    homes = [home for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    candidates = [*(f"{home}/bin/nvcc" for home in homes), "nvcc", *(f"{prefix}/bin/nvcc" for prefix in _CUDA_FOLDERS)]
    for candidate in candidates:
        if (path := shutil.which(candidate)) is not None:
            return Compiler(path, _version(path))
    raise OpforgeError(
        "a .cu file needs CUDA's compiler, nvcc, and there is none in CUDA_HOME, on the PATH or in /usr/local/cuda; "
        "install the CUDA toolkit (https://developer.nvidia.com/cuda-downloads) and set CUDA_HOME to its folder"
    )


@functools.cache
def _version(path: str) -> str:
    try:
        completed = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OpforgeError(f"the compiler {path} does not run: {error}") from None
    lines = [line for line in completed.stdout.splitlines() if line.strip()]
    if completed.returncode or not lines:
        raise OpforgeError(f"the compiler {path} does not run: {(completed.stderr or completed.stdout).strip()[-300:]}")
    return next((line for line in lines if line.startswith("Cuda compilation tools")), lines[0])


@functools.cache
def cuda_architectures() -> tuple[str, ...]:
    """Return the architectures to build CUDA code for.

    They come from ``$TORCH_CUDA_ARCH_LIST``, else from this machine's GPUs; none leaves the choice
    to nvcc.
    """
    named = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if named:
        return tuple(_architecture(word) for word in re.split(r"[;,\s]+", named.strip()) if word)
    if shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    capabilities = re.findall(r"^\d+\.\d+$", completed.stdout, re.MULTILINE) if completed.returncode == 0 else []
    return tuple(sorted({f"{word.replace('.', '')}" for word in capabilities}))


def _architecture(word: str) -> str:
    match = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", word)
    if match is None:
        raise OpforgeError(
            f"TORCH_CUDA_ARCH_LIST holds {word!r}; entries look like 9.0, 9.0a or 8.0+PTX, with ; between them"
        )
    return f"{match[1]}{match[2]}{match[3]}{match[4] or ''}"


def cuda_architecture_flags() -> list[str]:
    """Return nvcc's flags for the architectures."""
    flags = []
    for name in cuda_architectures():
        number = name.removesuffix("+PTX")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if name.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def python_include() -> str:
    """Return the folder of Python.h."""
    folder = sysconfig.get_path("include")
    if not (Path(folder) / "Python.h").is_file():
        raise OpforgeError(
            f"the source needs Python.h, and {folder} has none; install Python's headers (`apt install python3-dev`), "
            "or include torch/library.h instead of torch/extension.h, which needs no Python"
        )
    return folder


def check_target(version: str) -> None:
    """Reject a version of torch that this torch cannot build for."""
    target_version(version)
    installed = ".".join(cache.torch_version().split(".")[:2])
    if not _numbers(OLDEST_TORCH) <= _numbers(version) <= _numbers(installed):
        raise OpforgeError(
            f"--target {version} is out of range; the torch installed here builds for {OLDEST_TORCH} to {installed}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def target_version(version: str) -> str:
    """Return the value of TORCH_TARGET_VERSION for a version such as ``2.11``."""
    match = re.fullmatch(r"(\d+)\.(\d+)", version)
    if match is None:
        raise OpforgeError(
            f"{version!r} is not a version of torch to build for; give major and minor, such as {OLDEST_TORCH}"
        )
    return f"0x{int(match[1]):02x}{int(match[2]):02x}000000000000"
