"""Make an installable backend from a directory of kernels: a readable package and its wheel."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import keyword
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, distribution, distributions, packages_distributions
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import jinja2

import opforge.runtime
from opforge.backends import BackendOptions
from opforge.backends.directory import DirectoryBackend
from opforge.errors import OpforgeError
from opforge.kernels import Kernel, native
from opforge.kernels.proof import PROOF_SUFFIX, proof_path, read_proof
from opforge.kernels.source import dependencies, imported_modules
from opforge.ops import table
from opforge.runtime import signing, untrusted_files
from opforge.runtime.plan_files import (
    CUBIN_FOLDER,
    PLANS_SUFFIX,
    PlanFile,
    plans_path,
    read_cubin,
    read_plan_file,
    write_plan_file,
)

_SUMMARY = "Kernels for PyTorch operators, in ATen's place, each with its proof."
"""Summary of a packed backend; it also identifies packages made by opforge."""
_TEMPLATES = ("__init__.py", "pyproject.toml", "README.md")


@dataclass(frozen=True, slots=True)
class PackedKernel:
    """A kernel in a package; paths are relative to the package."""

    name: str
    primary: str
    file: str
    entries: tuple[str, ...]
    serves: tuple[tuple[str, bool], ...]
    """Operators, each with whether the kernel must serve it."""
    digest: str
    proof: str
    """Path of the proof; empty if there is none."""
    library: str
    """Path of the built library; empty for a kernel in Python."""
    files: dict[str, str]
    """SHA-256 by path."""
    proven: str
    """Description of the proof; empty if nothing is proven."""
    plans: str = ""
    """Path of the launch plans; empty if there are none."""
    planned: str = ""
    """Description of the launch plans, or why they are left out; empty if there are none."""

    def wire(self) -> dict[str, Any]:
        """Return the row of ``kernels.json``."""
        row = asdict(self)
        del row["proven"], row["planned"]
        return row


@dataclass(frozen=True, slots=True)
class PackedBackend:
    """A package made from a directory."""

    project: Path
    wheel: Path
    kernels: list[PackedKernel]
    ignored_folders: list[str]
    """Messages about folders without a kernel."""
    signer: str
    """Signer name of this installation."""
    native: str
    """File name of the native runtime's library in it, or why there is none."""


def pack(directory: Path, name: str, out: Path, *, version: str = "0.1.0") -> PackedBackend:
    """Write ``out/name`` and its wheel in ``out``; a failure leaves nothing behind."""
    _check_name_and_version(name, version)
    backend = DirectoryBackend(BackendOptions(ops_directory=directory))
    kernels = backend.kernels([op.name for op in table()])
    for kernel in kernels:
        if kernel.broken:
            raise OpforgeError(f"{kernel.file!r} cannot be packed: {kernel.broken}")
        _check_encoding(Path(kernel.file or ""))
    project = out / name
    try:
        if project.exists():
            raise OpforgeError(f"{str(project)!r} exists already; remove it, or give another --out or --name")
        with _created_folder(out), tempfile.TemporaryDirectory(dir=out, prefix=f".{name}.") as folder:
            draft = Path(folder) / name
            packed, signer, library = _write_project(draft, kernels, name, version)
            wheel = _build_wheel(draft, Path(folder))
            wheel_path = wheel.replace(out / wheel.name)
            draft.replace(project)
    except OSError as error:
        raise OpforgeError(
            f"the package cannot be made in --out {str(out)!r}: {error.strerror or error}: "
            f"{str(error.filename or out)!r}; "
            "name a writable folder, and make the files beside the kernels readable"
        ) from None
    return PackedBackend(project, wheel_path, packed, backend.skipped, signer, library)


@contextmanager
def _created_folder(folder: Path) -> Iterator[None]:
    """Create a folder; if the block fails, remove the created folders that are empty."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for path in new:
            with suppress(OSError):
                path.rmdir()
        raise


def _check_name_and_version(name: str, version: str) -> None:
    if (
        not re.fullmatch(r"[a-z][a-z0-9_]*", name, re.ASCII | re.IGNORECASE)
        or keyword.iskeyword(name)
        or "__" in name
        or name.endswith("_")
    ):
        raise OpforgeError(
            f"name {name!r} is not a package name; use letters, digits and single underscores between them, such as "
            "my_backend"
        )
    if _normal(name) in _RESERVED_NAMES or _is_installed_name(name):
        raise OpforgeError(f"name {name!r} is another package's; choose one of your own, such as my_{name}")
    if not re.fullmatch(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?", version, re.ASCII):
        raise OpforgeError(f"--version {version!r} is not a version; write 0.1.0, 1.2 or 1.0rc1")


def _normal(name: str) -> str:
    """Return a name as installers compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


_RESERVED_NAMES = {
    _normal(n)
    for n in (*sys.stdlib_module_names, "numpy", "opforge", "pip", "setuptools", "test", "tests", "torch", "triton")
}
"""Names of other packages, installed or not."""


def _is_installed_name(name: str) -> bool:
    """Whether an installed distribution or module, other than a packed backend, has this name."""
    foreign = {
        _field(installed, "Name")
        for installed in distributions()
        if not installed.entry_points.select(group="torch.backends") or _field(installed, "Summary") != _SUMMARY
    }
    modules = {module for module, owners in packages_distributions().items() if not foreign.isdisjoint(owners)}
    if _normal(name) in {_normal(other) for other in foreign | modules if other}:
        return True
    spec = PathFinder.find_spec(name)
    if spec is None or spec.origin is None:  # any folder is a namespace package
        return False
    return not (Path(spec.origin).parent / "_runtime" / "enabling.py").is_file()


def _field(installed: Distribution, name: str) -> str:
    """Return a field of a distribution's metadata; empty if it is not there, as in a broken installation."""
    values: list[str] | None = installed.metadata.get_all(name)
    return values[0] if values else ""


def _check_encoding(file: Path) -> None:
    if native.is_native(file):
        return
    try:
        file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise OpforgeError(
            f"{str(file)!r} is not UTF-8 ({error.reason} at byte {error.start}); a package takes kernels in UTF-8 "
            "only: save it as such"
        ) from None
    except OSError as error:
        raise OpforgeError(f"{str(file)!r} cannot be read: {error.strerror}; make it readable, or remove it") from None


def _write_project(
    project: Path, kernels: Iterable[Kernel], name: str, version: str
) -> tuple[list[PackedKernel], str, str]:
    """Write a package; return its kernels, the signer's name, and that of the native runtime's library."""
    package = project / "src" / name
    package.mkdir(parents=True)
    packed = [_copy_kernel(kernel, package) for kernel in kernels]
    stored_rows = [kernel.wire() for kernel in packed]
    signature = signing.sign(signing.load_or_create_key(), stored_rows)
    for file, contents in (("kernels.json", stored_rows), ("signature.json", signature)):
        (package / file).write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    runtime = Path(opforge.runtime.__file__).parent
    shutil.copytree(runtime, package / "_runtime", ignore=shutil.ignore_patterns("__pycache__", "prebuilt"))
    library = _ship_native_library(package / "_runtime")
    (package / "_runtime" / "LICENSE").write_text(_license(), encoding="utf-8")
    facts = {
        "name": name,
        "version": version,
        "summary": _SUMMARY,
        "rows": packed,
        "first": packed[0].serves[0][0],
        "runtime": opforge.runtime.RUNTIME_VERSION,
        "signer": signature["signer"],
        "triton": any(
            _imports_triton(package / file) for kernel in packed if not kernel.library for file in kernel.files
        ),
    }
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("opforge.package", "backend"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  # Python, TOML and Markdown, from the user's own directory
    )
    for template in _TEMPLATES:
        path = package / template if template.endswith(".py") else project / template
        path.write_text(environment.get_template(f"{template}.j2").render(**facts), encoding="utf-8")
    if any(kernel.library for kernel in packed):
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        (project / "setup.cfg").write_text(f"[bdist_wheel]\nplat_name = {platform}\n", encoding="utf-8")
    return packed, signature["signer"], library


def _ship_native_library(runtime: Path) -> str:
    """Add this machine's library of the native runtime, of which other machines then need not build their own."""
    from opforge.runtime.native import building

    try:
        return building.ship(runtime / "native" / "prebuilt").name
    except building.NativeError as error:
        return f"none: {error}"


def _license() -> str:
    """Return opforge's license text, which applies to the copied runtime."""
    source = Path(opforge.runtime.__file__).parents[2]
    if source.name == "src":  # a checkout, installed or not
        return (source.parent / "LICENSE").read_text(encoding="utf-8")
    text = distribution("opforge").read_text("licenses/LICENSE")
    if text is None:
        raise OpforgeError(
            "opforge is installed without its LICENSE, which a package must carry; install opforge again"
        )
    return text


def _imports_triton(file: Path) -> bool:
    return file.suffix == ".py" and "triton" in imported_modules(file.read_text(encoding="utf-8", errors="replace"))


def _copy_kernel(kernel: Kernel, package: Path) -> PackedKernel:
    """Copy a kernel with the files it needs and its proof."""
    file = Path(kernel.file or "")
    place = f"kernels/{kernel.name.partition('_implementation_')[0]}"
    folder = package / place
    for source in _files_to_copy(file):
        copy = folder / source.relative_to(file.parent)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, copy)
    library = proof = ""
    if native.is_native(file):
        built = native.build(native.LibrarySpec.of_file(file)).library
        shutil.copy2(built, folder / built.name)
        library = f"{place}/{built.name}"
    if not isinstance(read_proof(file, kernel.digest), str):
        proof_file = proof_path(file)
        shutil.copy2(proof_file, folder / proof_file.name)
        proof = f"{place}/{proof_file.name}"
    plans, planned = _copy_plans(file, kernel.digest, folder)
    files = {
        path.relative_to(package).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    serves = tuple((served.op, served.required) for served in kernel.serves)
    return PackedKernel(
        kernel.name, kernel.primary, f"{place}/{file.name}", tuple(kernel.entries), serves, kernel.digest, proof,
        library, files, _describe_proof(kernel), plans and f"{place}/{plans}", planned,
    )  # fmt: skip


def _copy_plans(file: Path, digest: str, folder: Path) -> tuple[str, str]:
    """Copy a kernel's launch plans if this installation made them; return their file's name, and a description.

    A kernel's author could write plans that do something else than the kernel that was judged.
    """
    plans = read_plan_file(plans_path(file))
    if plans is None:
        return "", ""
    if isinstance(plans, PlanFile) and plans.origin.digest != digest:
        plans = "the kernel has changed since they were made"
    if isinstance(plans, str):
        return "", f"launch plans are left out: {plans}; make them again with `save_plans()`"
    try:
        cubins = {cubin: read_cubin(file.parent, cubin) for cubin in plans.cubins}
    except (OSError, ValueError) as error:
        return "", f"launch plans are left out: {error}; make them again with `save_plans()`"
    path = plans_path(folder / file.name)
    write_plan_file(path, plans, cubins)
    return path.name, f"{plans.count} launch plans for {plans.origin.architecture}, torch {plans.origin.torch}"


def _files_to_copy(file: Path) -> list[Path]:
    """Return the files in and below a kernel's folder, except proofs, launch plans and unused implementations."""
    needed = {file, *dependencies(file)}
    return [
        path
        for path in sorted(untrusted_files.files_below(file.parent))
        if path in needed
        or not (
            path.name.endswith((PROOF_SUFFIX, PLANS_SUFFIX))
            or path.parent == file.parent / CUBIN_FOLDER
            or (
                "_implementation_" in path.name
                and path.parent == file.parent
                and path.suffix in (".py", *native.SUFFIXES)
            )
        )
    ]


def _describe_proof(kernel: Kernel) -> str:
    """Describe the operators, dtypes and device a kernel is proven for; empty if none."""
    proof = read_proof(Path(kernel.file or ""), kernel.digest)
    if isinstance(proof, str) or not proof.operators:
        return ""
    dtypes = sorted({dtype for op_dtypes in proof.operators.values() for dtype in op_dtypes})
    shown = "; ".join(dtypes[:4]) + ("; …" if len(dtypes) > 4 else "")
    return f"{len(proof.operators)} operators, {shown} on {proof.device}, torch {proof.torch}"


def _build_wheel(project: Path, out: Path) -> Path:
    isolated = (
        []
        if importlib.util.find_spec("setuptools") is None or not _setuptools_builds_wheels()
        else ["--no-build-isolation"]
    )
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    command = [*pip, "wheel", "--no-deps", *isolated, "-w", str(out), str(project)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(out.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        raise OpforgeError(f"pip could not make the wheel:\n{(process.stderr or process.stdout)[-2000:]}")
    for leftover in (project / "build", *(project / "src").glob("*.egg-info")):
        shutil.rmtree(leftover, ignore_errors=True)
    return wheels[0]


def _setuptools_builds_wheels() -> bool:
    """Whether setuptools can make wheels itself and supports license files."""
    major, minor, *_ = installed_version("setuptools").split(".")
    return (int(major), int(minor)) >= (77, 0)
