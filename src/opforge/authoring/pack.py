"""Make an installable backend of a directory of kernels: a readable package, and its wheel."""

from __future__ import annotations

import importlib.util
import json
import keyword
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import jinja2

import opforge.runtime
from opforge.backends import BackendOptions
from opforge.backends.directory import DirectoryBackend
from opforge.cache import read_json
from opforge.errors import OpforgeError
from opforge.kernels import Kernel, native
from opforge.kernels.proofs import proof_of
from opforge.ops import table

_TEMPLATES = ("__init__.py", "pyproject.toml", "README.md")


@dataclass(frozen=True, slots=True)
class Packed:
    """A package that was made of a directory."""

    project: Path
    wheel: Path
    rows: list[dict[str, Any]]
    strangers: list[str]
    """Folders that hold no kernel, in words."""


def pack(directory: Path, name: str, out: Path, *, version: str = "0.1.0") -> Packed:
    """Write ``out/name`` and its wheel in ``out``; nothing is left behind where that fails."""
    _check(name, version)
    project = out / name
    if project.exists():
        raise OpforgeError(f"{str(project)!r} exists already; remove it, or give another --out or --name")
    backend = DirectoryBackend(BackendOptions(ops_directory=directory))
    kernels = backend.kernels([op.name for op in table()])
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=f".{name}.") as folder:
        draft = Path(folder) / name
        rows = _write(draft, kernels, name, version)
        wheel = _wheel(draft, Path(folder))
        shutil.move(draft, project)
        made = out / wheel.name
        wheel.replace(made)
    return Packed(project, made, rows, backend.strangers)


def _check(name: str, version: str) -> None:
    if not name.isidentifier() or keyword.iskeyword(name) or not name.isascii() or name.startswith("_"):
        raise OpforgeError(
            f"name {name!r} cannot be that of a package; take letters, digits and underscores, such as my_backend"
        )
    if name in sys.stdlib_module_names or name in ("torch", "opforge", "triton", "test", "tests"):
        raise OpforgeError(f"name {name!r} is another package's; choose one of your own, such as my_{name}")
    if not re.fullmatch(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?", version):
        raise OpforgeError(f"--version {version!r} is not a version; write 0.1.0, 1.2 or 1.0rc1")


def _write(project: Path, kernels: Iterable[Kernel], name: str, version: str) -> list[dict[str, Any]]:
    package = project / "src" / name
    package.mkdir(parents=True)
    rows = [_take(kernel, package) for kernel in kernels]
    (package / "kernels.json").write_text(json.dumps([_kept(row) for row in rows], indent=1) + "\n")
    runtime = Path(opforge.runtime.__file__).parent
    shutil.copytree(runtime, package / "_runtime", ignore=shutil.ignore_patterns("__pycache__"))
    facts = {
        "name": name,
        "version": version,
        "rows": rows,
        "first": rows[0]["serves"][0][0],
        "runtime": opforge.runtime.RUNTIME,
        "triton": any("import triton" in (package / row["file"]).read_text() for row in rows if not row["library"]),
    }
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("opforge.authoring", "backend"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  # Python, TOML and Markdown, from a directory that is the user's own
    )
    for template in _TEMPLATES:
        place = package / template if template.endswith(".py") else project / template
        place.write_text(environment.get_template(f"{template}.j2").render(**facts))
    if any(row["library"] for row in rows):
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        (project / "setup.cfg").write_text(f"[bdist_wheel]\nplat_name = {platform}\n")
    return rows


def _take(kernel: Kernel, package: Path) -> dict[str, Any]:
    """Copy a kernel's folder, with its neighbours and its proof, and return its row."""
    file = Path(kernel.file or "")
    folder = package / "kernels" / file.parent.name
    folder.mkdir(parents=True, exist_ok=True)
    proof = proof_of(file)
    for other in file.parent.iterdir():
        if other.is_file() and (other == file or (other.suffix == ".py" and "_implementation_" not in other.name)):
            shutil.copy2(other, folder / other.name)
    row: dict[str, Any] = {
        "name": kernel.name, "primary": kernel.primary, "file": f"kernels/{file.parent.name}/{file.name}",
        "entries": list(kernel.entries), "serves": [[s.op, s.required] for s in kernel.serves], "digest": kernel.digest,
        "proof": "", "library": "", "proven": _proven(kernel, read_json(proof)),
    }  # fmt: skip
    if proof.is_file():
        shutil.copy2(proof, folder / proof.name)
        row["proof"] = f"kernels/{file.parent.name}/{proof.name}"
    if native.is_native(file):
        library = native.build(native.Unit.of_file(file)).library
        shutil.copy2(library, folder / library.name)
        row["library"] = f"kernels/{file.parent.name}/{library.name}"
    return row


def _kept(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "proven"}


def _proven(kernel: Kernel, proof: Any) -> str:
    """Say for which dtypes a kernel is proven, on which device; nothing where it is for none."""
    if not isinstance(proof, dict) or proof.get("digest") != kernel.digest:
        return ""
    dtypes = sorted({dtype for found in proof["operators"].values() for dtype in found})
    shown = "; ".join(dtypes[:4]) + ("; …" if len(dtypes) > 4 else "")
    return f"{len(proof['operators'])} operators, {shown} on {proof['device']}, torch {proof['torch']}"


def _wheel(project: Path, out: Path) -> Path:
    isolated = [] if importlib.util.find_spec("setuptools") is None or not _new_enough() else ["--no-build-isolation"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "wheel",
        "--no-deps",
        *isolated,
        "-w",
        str(out),
    ]
    done = subprocess.run([*command, str(project)], capture_output=True, text=True, check=False)
    found = list(out.glob("*.whl"))
    if done.returncode or len(found) != 1:
        raise OpforgeError(f"pip could not make the wheel:\n{(done.stderr or done.stdout)[-2000:]}")
    for left in (project / "build", *(project / "src").glob("*.egg-info")):
        shutil.rmtree(left, ignore_errors=True)
    return found[0]


def _new_enough() -> bool:
    """Whether setuptools makes wheels by itself."""
    major, minor, *_ = installed_version("setuptools").split(".")
    return (int(major), int(minor)) >= (70, 1)
