"""What the build must know of the installed torch: as JSON for CMake{% if cookiecutter.abi == "full" %}, and as the requirement that the wheel declares{% endif %}."""

import json
{% if cookiecutter.abi == "full" %}
from collections.abc import Mapping
from typing import Any
{% endif %}

import torch
from torch.utils import cpp_extension


def facts() -> dict[str, object]:
    """Return version, CUDA version (empty where torch has none) and the folders of headers and libraries."""
    return {
        "version": torch.__version__.partition("+")[0],
        "cuda": torch.version.cuda or "",
        "include": ";".join(cpp_extension.include_paths("cpu")),
        "library": ";".join(cpp_extension.library_paths("cpu")),
    }
{% if cookiecutter.abi == "full" %}


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the torch that the library is built with, which is the only one that it works with: the full ABI changes between versions."""
    major, minor = torch.__version__.split(".")[:2]
    return {"dependencies": [f"torch=={major}.{minor}.*"]}


def dynamic_wheel(settings: Mapping[str, Any]) -> dict[str, bool]:
    """Say that a wheel's dependencies are not those of the source distribution, which is built with any torch."""
    return {"dependencies": True}
{% endif %}


if __name__ == "__main__":
    print(json.dumps(facts()))
