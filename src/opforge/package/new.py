"""Make a package of custom operators from the template, which also works with Cookiecutter."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2

from opforge.errors import OpforgeError
from opforge.imports import run_file

PREREQUISITES = {"triton": "'setuptools>=77'", "cpp": "scikit-build-core cmake ninja"}
"""Packages beside torch that building a package needs, by variant."""
TEMPLATE_FOLDER = Path(__file__).resolve().with_name("template")
_PROJECT_FOLDER = "{{cookiecutter.package}}"


@dataclass(frozen=True, slots=True)
class NewPackage:
    """A new package."""

    folder: Path
    files: tuple[Path, ...]
    """Paths relative to the folder."""


@cache
def template_settings() -> dict[str, Any]:
    """Return the template's settings from its ``cookiecutter.json``."""
    values: dict[str, Any] = json.loads((TEMPLATE_FOLDER / "cookiecutter.json").read_text())
    return values


def questions() -> dict[str, tuple[str, ...]]:
    """Return the questions with their choices; a free-text question has only its default."""
    defaults = {name: value for name, value in template_settings().items() if not name.startswith("_")}
    return {name: tuple(value) if isinstance(value, list) else (value,) for name, value in defaults.items()}


def prompt(name: str) -> str:
    """Return the prompt for a question."""
    text: str = template_settings()["__prompts__"][name]
    return text


@cache
def _hook(name: str) -> ModuleType:
    """Load one of the template's hooks as a module; rules and steps are defined only there."""
    return run_file(TEMPLATE_FOLDER / "hooks" / f"{name}.py", f"_opforge_template_{name}")


def torch_namespaces() -> frozenset[str]:
    """Return the namespaces that torch itself registers operators in."""
    names: frozenset[str] = _hook("pre_gen_project").TORCH_NAMESPACES
    return names


def with_defaults(answers: Mapping[str, str]) -> dict[str, str]:
    """Return the answers, with defaults for missing ones."""
    return {name: answers.get(name, choices[0]) for name, choices in questions().items()}


def invalid_answers(answers: Mapping[str, str]) -> list[str]:
    """Return messages about invalid answers; empty if a package can be made."""
    messages: list[str] = _hook("pre_gen_project").problems(with_defaults(answers))
    return messages


def make_package(answers: Mapping[str, str], out: Path) -> NewPackage:
    """Make a package in a new folder with its name under ``out``, completely or not at all."""
    all_answers = with_defaults(answers)
    if messages := invalid_answers(all_answers):
        raise OpforgeError("; ".join(messages))
    folder = out / all_answers["package"]
    try:
        _refuse_existing(folder)
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out, prefix=f".{all_answers['package']}.") as draft_folder:
            project = Path(draft_folder) / all_answers["package"]
            _render(project, all_answers)
            _hook("post_gen_project").keep_variant(project, all_answers["variant"])
            project.rename(folder)  # replaces at most an empty folder
    except OSError as error:
        raise OpforgeError(
            f"package {str(folder)!r} cannot be made: {error.strerror}; give another place with --out"
        ) from None
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return NewPackage(folder, tuple(files))


def _refuse_existing(folder: Path) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise OpforgeError(
            f"{str(folder)!r} exists already and is not a folder; choose another name, or another place with --out"
        )
    if folder.is_dir() and any(folder.iterdir()):
        raise OpforgeError(f"folder {str(folder)!r} is not empty; choose another name, or another place with --out")


def _render(project: Path, answers: Mapping[str, str]) -> None:
    """Write the template's files as Cookiecutter would."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  # source files
        **template_settings()["_jinja2_env_vars"],
    )
    source = TEMPLATE_FOLDER / _PROJECT_FOLDER
    for path in sorted(source.rglob("*")):
        if "__pycache__" in path.parts:  # pip byte-compiles installed files, including the template
            continue
        name = environment.from_string(path.relative_to(source).as_posix()).render(cookiecutter=answers)
        if path.is_dir():
            (project / name).mkdir(parents=True, exist_ok=True)
            continue
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        text = environment.from_string(path.read_text()).render(cookiecutter=answers)
        (project / name).write_text(text)
        shutil.copymode(path, project / name)
