"""Load the compiled library, which registers the operators. Importing this module does it, once."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

PACKAGE = "{{ cookiecutter.package }}"
FILE = f"lib{PACKAGE}.so"
BUILD = "build it with `pip install --no-build-isolation .` in the project's folder (-e for an editable install)"


def load() -> Path:
    """Load the library and return where it lies. What is wrong with it is said in an ImportError, before it can end the process."""
    path = _find()
    if str(path) not in torch.ops.loaded_libraries:
        _check_torch(path)
        _check_namespace(path)
        _warn_of_changes(path)
        try:
            torch.ops.load_library(path)
        except OSError as error:
            raise ImportError(
                f"{path} cannot be loaded: {error}; if torch was changed since it was built, {BUILD}"
            ) from error
    return path


def _find() -> Path:
    """Return the library's path. An editable install has two folders: that of the sources, and one for what was built."""
    folders = [Path(folder) for folder in sys.modules[__package__].__path__]
    for folder in folders:
        if (folder / FILE).is_file():
            return (folder / FILE).resolve()
    places = " or ".join(map(str, folders))
    raise ImportError(f"the library of {PACKAGE}, {FILE}, is not in {places}: it is not built yet; {BUILD}")


def _check_torch(path: Path) -> None:
    """Refuse a torch for which the library was not built."""
    built: dict[str, Any] = json.loads(path.with_name("built.json").read_text())
    if built["abi"] == "full" and _version(torch.__version__) != _version(built["torch"]):
        raise ImportError(
            f"{path} was built with torch {built['torch']} and its full ABI, which works with no other; this is torch "
            f"{torch.__version__}: install torch {built['torch']}, or {BUILD}"
        )
    if _version(torch.__version__) < _version(built["oldest"]):
        raise ImportError(
            f"{path} needs torch {built['oldest']} or newer, and this is torch {torch.__version__}; upgrade torch"
        )
    if built["cuda"] and torch.version.cuda is None:
        raise ImportError(
            f"{path} has kernels for CUDA {built['cuda']}, and torch {torch.__version__} has no CUDA: "
            f"install a torch that has it, or {BUILD}"
        )


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _check_namespace(path: Path) -> None:
    """Refuse to add operators to a namespace in which they are already: torch would end the process."""
    taken = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{PACKAGE}::"))
    if taken:
        libraries = ", ".join(sorted(torch.ops.loaded_libraries)) or "no library, so by Python code"
        raise ImportError(
            f"{path} registers its operators as {PACKAGE}::…, and {', '.join(taken[:3])} are registered already "
            f"(loaded: {libraries}); two packages of one namespace cannot be used in one process"
        )


def _warn_of_changes(path: Path) -> None:
    """Warn where C++ sources, which an editable install has at hand, were changed after the library was built."""
    sources = Path(__file__).resolve().parents[1] / "csrc"
    if not (sources.parents[1] / "CMakeLists.txt").is_file():
        return
    built_at = path.stat().st_mtime
    changed = sorted(file.name for file in sources.iterdir() if file.stat().st_mtime > built_at)
    if changed:
        warnings.warn(f"{', '.join(changed)} changed after {path} was built; {BUILD}", stacklevel=2)


load()
