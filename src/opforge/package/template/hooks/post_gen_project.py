"""Keeps the files of the variant that was chosen. As a script it works on the folder that it is started in; `opforge new` imports it."""

from __future__ import annotations

import shutil
from pathlib import Path

VARIANT = "{{ cookiecutter.variant }}"


def keep_variant(project: Path, variant: str) -> None:
    """Move the files of one variant over the project, and remove the variants."""
    chosen = project / "variants" / variant
    for path in sorted(chosen.rglob("*")):
        place = project / path.relative_to(chosen)
        if path.is_dir():
            place.mkdir(exist_ok=True)
        else:
            shutil.move(path, place)
    shutil.rmtree(project / "variants")
    for cache in sorted(project.rglob("__pycache__")):  # pip compiles what it installs, the template too
        shutil.rmtree(cache)


if __name__ == "__main__":
    keep_variant(Path.cwd(), VARIANT)
