"""`opforge new`: a package of custom operators that builds, passes its tests and compiles from the first minute."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from opforge.errors import OpforgeError


def register(app: typer.Typer) -> None:
    app.command("new")(new)


def new(
    name: Annotated[str, typer.Argument(help="Name of the package and of its operators' namespace.")] = "",
    variant: Annotated[str | None, typer.Option(help="Language of the kernels: triton or cpp (C++ and CUDA).")] = None,
    abi: Annotated[
        str | None,
        typer.Option(help="ABI of a C++ library: stable (also runs on later torch) or full (for one torch)."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Parent folder of the package's folder.")] = Path(),
    description: Annotated[str | None, typer.Option(help="Purpose of the package, in one line.")] = None,
    author: Annotated[str | None, typer.Option(help="Author of the package.")] = None,
    torch: Annotated[str | None, typer.Option(help="Oldest torch to support (default: 2.11).")] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask; use defaults for options that are not given.")
    ] = False,
    template: Annotated[
        bool, typer.Option("--template", help="Only print the path of the template, for the Cookiecutter command.")
    ] = False,
) -> int:
    """Make a package of custom PyTorch operators: kernels, registration, fakes, gradients, tests, benchmark and CI."""
    from opforge.package.new import PREREQUISITES, TEMPLATE_FOLDER, make_package, with_defaults

    if template:
        sys.stdout.write(f"{TEMPLATE_FOLDER}\n")
        return 0
    given = {
        "package": name or None, "variant": variant, "abi": abi, "description": description, "author": author,
        "torch": torch,
    }  # fmt: skip
    answers = {key: value for key, value in given.items() if value is not None}
    if sys.stdin.isatty() and not yes:
        answers = _ask(answers)
    if not name and "package" not in answers:
        raise OpforgeError("the name of the package is missing; give one, for example `opforge new my_ops`")
    made = make_package(answers, out)
    chosen = with_defaults(answers)
    kind = "triton" if chosen["variant"] == "triton" else f"cpp, {chosen['abi']} ABI"
    compiler = "" if chosen["variant"] == "triton" else "  # and a C++ compiler: apt install g++"
    sys.stdout.write(
        f"made {made.folder} ({kind}), {len(made.files)} files; next:\n"
        f"  cd {made.folder}\n"
        f"  pip install 'torch>={chosen['torch']}' {PREREQUISITES[chosen['variant']]}{compiler}\n"
        "  pip install --no-build-isolation -e '.[test]'\n"
        "  pytest\n"
        "  opforge add-op NAME\n"
    )
    return 0


def _ask(answers: dict[str, str]) -> dict[str, str]:
    """Ask for what is not given, again until it can be used; questions go to stderr."""
    from opforge.package.new import invalid_answers, prompt, questions, with_defaults

    given = dict(answers)
    if wrong := invalid_answers({"package": "my_own_new_ops", **given}):  # what was given is not asked again
        raise OpforgeError("; ".join(wrong))
    for name, choices in questions().items():
        if name in given or (name == "abi" and given["variant"] != "cpp"):
            continue
        text = f"{prompt(name)} ({', '.join(choices)})" if len(choices) > 1 else prompt(name)
        while True:
            answer = _answer(text, choices[0])
            wrong = invalid_answers(with_defaults({"package": "my_own_new_ops", **given, name: answer}))
            if not wrong:
                break
            sys.stderr.write("; ".join(wrong) + "\n")
        given[name] = answer
    return given


def _answer(text: str, default: str) -> str:
    """Return the line that was typed, or the default when it is empty."""
    sys.stderr.write(f"{text} [{default}]: ")
    sys.stderr.flush()
    if not (line := sys.stdin.readline()):
        raise typer.Abort
    return line.strip() or default
