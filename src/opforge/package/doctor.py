"""Examine the installation: facts in sections, and problems with their fixes."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path
from typing import Any

from opforge import cache
from opforge.errors import NothingToJudgeError, OpforgeError
from opforge.kernels.native import clashes, compiler, inspect, sources, toolchain
from opforge.kernels.native.builder import LibrarySpec
from opforge.package import build
from opforge.procs.child import run_command
from opforge.runs.execute.judge_pool import start_server
from opforge.sandbox.host import system_check
from opforge.suites.base import Progress, no_progress

_OLDEST_PYTHON = (3, 11)
_HIDDEN_EXTRAS = ("dev",)
_CXX20_PROGRAM = (
    "#include <concepts>\ntemplate <std::integral T> T twice(T x) { return 2 * x; }\nint main() { return twice(0); }\n"
)
_STABLE_HEADERS = "#include <torch/csrc/stable/library.h>\n#include <torch/csrc/stable/tensor.h>\n"
_OLDEST_CXX20_CUDA = 12

_NATIVE_STATE = (sys.executable, "-P", "-W", "ignore", "-m", "opforge.runtime.native_state")
_NATIVE_STATE_LIMIT_S = 180.0

Facts = dict[str, Any]
"""Facts of one section by name, to be shown or written as JSON; a missing tool has fewer of them."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What would break, and what to do about it."""

    what: str
    fix: str


@dataclass
class Health:
    """Facts by section, problems with their fixes, and notes."""

    facts: dict[str, Facts] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add_problem(self, description: str, fix: str) -> None:
        self.problems.append(Problem(description, fix))

    def add_clash(self, clash: clashes.Clash) -> None:
        problem, _, fix = str(clash).partition("; ")
        self.add_problem(problem, fix)

    def as_json(self) -> dict[str, Any]:
        return {**self.facts, "problems": [asdict(problem) for problem in self.problems], "notes": self.notes}


def examine(directory: Path | None = None, progress: Progress = no_progress) -> Health:
    """Examine the installation, and a folder of libraries if given."""
    health = Health()
    steps: list[tuple[str, Callable[[Health], Facts]]] = [
        ("python", _python), ("torch", _torch), ("compilers", _compilers), ("gpu", _gpu), ("cache", _cache),
        ("native_runtime", _native_runtime), ("confinement", _confinement), ("extras", _extras),
    ]  # fmt: skip
    if directory is not None:
        units = _units(directory)
        steps.append(("folder", lambda health: _folder(health, directory, units)))
    for number, (name, step) in enumerate(steps):
        progress(name, number, len(steps))
        health.facts[name] = step(health)
    return health


def _python(health: Health) -> Facts:
    include = sysconfig.get_path("include")
    headers = (Path(include) / "Python.h").is_file()
    if sys.version_info[:2] < _OLDEST_PYTHON:
        health.add_problem(f"Python is {platform.python_version()}", "opforge needs Python 3.11 or newer")
    if not headers:
        health.notes.append(
            f"no Python.h in {include}: sources that include torch/extension.h cannot be built (`apt install "
            "python3-dev`)"
        )
    return {
        "version": platform.python_version(), "executable": sys.executable, "prefix": sys.prefix, "include": include,
        "headers": headers, "packages": sysconfig.get_path("purelib"), "suffix": sysconfig.get_config_var("EXT_SUFFIX"),
        "opforge": str(Path(__file__).resolve().parents[1]),
    }  # fmt: skip


def _torch(health: Health) -> Facts:
    try:
        facts = toolchain.torch_build()
    except (OpforgeError, PackageNotFoundError) as error:
        health.add_problem(f"torch does not work: {error}", "pip install 'torch>=2.11'")
        return {"version": None}
    numbers = re.match(r"(\d+)\.(\d+)", facts.version)
    if numbers and (int(numbers[1]), int(numbers[2])) < tuple(map(int, toolchain.OLDEST_TORCH.split("."))):
        health.add_problem(f"torch is {facts.version}", f"pip install 'torch>={toolchain.OLDEST_TORCH}'")
    if not Path(facts.include_folders[0], "torch", "csrc", "stable", "library.h").is_file():
        health.add_problem(
            f"{facts.include_folders[0]} lacks torch's headers",
            "install torch from a wheel: pip install --force-reinstall torch",
        )
    return {
        "version": facts.version, "path": facts.path, "include": list(facts.include_folders),
        "library": list(facts.library_folders), "cuda": facts.cuda, "cxx11_abi": facts.cxx11_abi,
        "stable_abi_target": toolchain.OLDEST_TORCH,
    }  # fmt: skip


def _compilers(health: Health) -> Facts:
    row: Facts = {"cxx": None, "nvcc": None, "cuda_architectures": list(toolchain.cuda_architectures())}
    try:
        cxx = toolchain.cxx()
        row |= {"cxx": cxx.path, "cxx_version": cxx.version}
        _try_cxx20(health, cxx)
    except OpforgeError as error:
        problem, _, fix = str(error).partition("; ")
        health.add_problem(f"C++ kernels cannot be built: {problem}", fix or "reinstall the compiler")
    try:
        nvcc = toolchain.nvcc()
        row |= {"nvcc": nvcc.path, "nvcc_version": nvcc.version}
        release = re.search(r"release (\d+)\.", nvcc.version)
        if release and int(release[1]) < _OLDEST_CXX20_CUDA:
            health.add_problem(
                f"{nvcc.path} ({nvcc.version}) has no C++20, which torch's headers need",
                f"install a CUDA toolkit {_OLDEST_CXX20_CUDA} or newer, and set CUDA_HOME to its folder",
            )
    except OpforgeError:
        health.notes.append("no nvcc: CUDA sources (.cu) cannot be built here; Python and C++ kernels do not need it")
    return row


def _try_cxx20(health: Health, cxx: toolchain.Compiler) -> None:
    with tempfile.TemporaryDirectory(prefix="opforge-doctor-") as folder:
        Path(folder, "trial.cpp").write_text(_CXX20_PROGRAM)
        try:
            compiler.run("trial", [cxx.path, "-std=c++20", "trial.cpp", "-o", "trial"], Path(folder), 60.0)
            if "include" in health.facts.get("torch", {}):
                include = [f"-isystem{path}" for path in health.facts["torch"]["include"]]
                target = f"-DTORCH_TARGET_VERSION={toolchain.target_version(toolchain.OLDEST_TORCH)}"
                Path(folder, "torch.cpp").write_text(_STABLE_HEADERS)
                words = [cxx.path, "-std=c++20", "-fsyntax-only", target, *include, "torch.cpp"]
                compiler.run("trial", words, Path(folder), 60.0)
        except compiler.BuildError as error:
            program = "torch's headers" if error.first_error.startswith(("torch", "/")) else "a C++20 program"
            health.add_problem(
                f"{cxx.path} ({cxx.version}) does not build {program}: {error.first_error}",
                "install g++ 11 or newer (`apt install g++`), or set CXX to a newer compiler",
            )


def _gpu(health: Health) -> Facts:
    row: Facts = {"devices": [], "driver": None, "driver_cuda": None}
    if shutil.which("nvidia-smi") is not None:
        row |= _nvidia(health)
    torch_cuda = health.facts["torch"].get("cuda")
    if row["devices"] and not torch_cuda:
        health.add_problem(
            f"there is a GPU ({row['devices'][0]}), and torch was built without CUDA",
            "install a torch with CUDA: pip install torch --index-url https://download.pytorch.org/whl/cu130",
        )
    if torch_cuda and row["driver_cuda"] and _major(row["driver_cuda"]) < _major(torch_cuda):
        health.add_problem(
            f"the driver supports CUDA {row['driver_cuda']}, and torch needs {torch_cuda}",
            "update NVIDIA's driver, or install a torch for an older CUDA",
        )
    nvcc = re.search(r"release (\d+)\.", health.facts["compilers"].get("nvcc_version") or "")
    if torch_cuda and nvcc and int(nvcc[1]) != _major(torch_cuda):
        health.add_problem(
            f"nvcc is of CUDA {nvcc[1]}, and torch was built with CUDA {torch_cuda}: their libraries are incompatible",
            f"set CUDA_HOME to a CUDA {_major(torch_cuda)} toolkit",
        )
    return row


def _nvidia(health: Health) -> Facts:
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        queried = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
        overview = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        health.notes.append(f"nvidia-smi does not answer: {error}")
        return {}
    if queried.returncode:
        health.notes.append(f"nvidia-smi finds no GPU: {(queried.stdout + queried.stderr).strip()[:200]}")
        return {}
    rows = [line.rpartition(", ") for line in queried.stdout.splitlines() if line.strip()]
    cuda = re.search(r"CUDA (?:UMD )?Version: *(\d+\.\d+)", overview.stdout)
    return {
        "devices": [name for name, _, _ in rows],
        "driver": rows[0][2] if rows else None,
        "driver_cuda": cuda[1] if cuda else None,
    }


def _major(text: str) -> int:
    return int(text.partition(".")[0])


def _cache(health: Health) -> Facts:
    root = cache.root()
    row = {"path": str(root), "free_gib": None, "libraries": len(list((root / "native").glob("*/*.so")))}
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=root):
            free = shutil.disk_usage(root).free / 2**30
    except OSError as error:
        health.add_problem(
            f"the cache {root} cannot be written: {error.strerror}", "set OPFORGE_CACHE to a folder of yours"
        )
        return row
    if free < 1:
        health.add_problem(
            f"the cache {root} has {free:.2f} GiB left",
            "free space there, or set OPFORGE_CACHE to a folder on a larger disk",
        )
    return {**row, "free_gib": round(free, 1)}


def _native_runtime(health: Health) -> Facts:
    """Return the state of the native runtime, asked in a process of its own."""
    if health.facts["torch"]["version"] is None:
        return {"library": "not looked for: it needs torch"}
    try:
        state = _native_state()
    except OpforgeError as error:
        health.add_problem(f"the native runtime does not work: {error}", "set OPFORGE_NATIVE=0, and report this")
        return {"library": None}
    if not state["wanted"]:
        health.notes.append("OPFORGE_NATIVE=0: kernels are called through Python, which is slower")
    elif state["problem"]:
        health.notes.append(f"kernels are called through Python, which is slower: {state['problem']}")
    if overridden := state["overridden_by_torch"]:
        health.notes.append(
            f"torch overrides {', '.join(overridden)} from Python (torch._native), and kernels are compared with that; "
            f"{state['advice']}"
        )
    no_plans = state["no_plans_reason"]
    return {
        "wanted": state["wanted"],
        "library": state["library"] or state["will_be_built"] or f"none: {state['problem']}",
        "layout": state["layout"], "launch_plans": f"none: {no_plans}" if no_plans else "possible",
        "overridden_by_torch": overridden,
    }  # fmt: skip


def _native_state() -> Facts:
    process = run_command(_NATIVE_STATE, label="looking at it", limit_s=_NATIVE_STATE_LIMIT_S)
    if process.returncode:
        lines = process.stderr.strip().splitlines() or ["no output"]
        raise OpforgeError(f"looking at it ended with exit status {process.returncode}: {lines[-1]}")
    state: Facts = json.loads(process.stdout)
    return state


def _confinement(health: Health) -> Facts:
    if health.facts["torch"]["version"] is None:
        return {"held": [], "missing": ["not tried: it needs torch"]}
    server = start_server("cpu")
    try:
        held = system_check.working_protections(server.spawner)
    except OpforgeError as error:
        health.add_problem(f"kernels cannot be run: {error}", "see the output above; importing torch may fail")
        return system_check.no_protections()
    finally:
        server.close()
    if held["missing"]:
        health.notes.append(
            f"not protected on this system: {', '.join(held['missing'])}; use Linux 5.19 or newer with Landlock"
        )
    return held


def _extras(health: Health) -> Facts:
    """Return each extra with its version or its install command."""
    try:
        extras = metadata("opforge").get_all("Provides-Extra") or []
    except PackageNotFoundError:
        health.notes.append(
            "opforge runs from its source and is not installed, so its extras are not known (`pip install -e .`)"
        )
        return {}
    rows: Facts = {}
    for extra in sorted(set(extras).difference(_HIDDEN_EXTRAS)):
        try:
            rows[extra] = {"version": version(extra)}
        except PackageNotFoundError:
            rows[extra] = {"version": None, "install": f"pip install 'opforge[{extra}]'"}
    return rows


def _units(directory: Path) -> list[LibrarySpec]:
    """Return the libraries of a folder; empty if it has none."""
    try:
        return build.units_in(directory)
    except NothingToJudgeError:
        return []


def _folder(health: Health, directory: Path, units: list[LibrarySpec]) -> Facts:
    modules = [_module(health, unit) for unit in units]
    for clash in clashes.clashes_of_sources({unit.name: build.registrations_of(unit) for unit in units}):
        health.add_clash(clash)
    libraries = sorted({*directory.rglob("*.so")})
    if not units and not libraries:
        health.notes.append(f"{directory} holds neither sources nor libraries")
    return {"path": str(directory.resolve()), "modules": modules, "libraries": _libraries(health, libraries)}


def _module(health: Health, unit: LibrarySpec) -> Facts:
    included = sources.includes(
        file.read_text(errors="replace") for file in (*unit.files, *sources.headers_in(unit.folder))
    )
    cuda = any(file.suffix == ".cu" for file in unit.files)
    python, full = sources.needs_python(included), sources.needs_full_headers(included)
    blocks = build.registrations_of(unit)
    if cuda and health.facts["compilers"]["nvcc"] is None:
        health.add_problem(
            f"{unit.name} holds CUDA sources, and there is no nvcc",
            "install the CUDA toolkit and set CUDA_HOME to its folder",
        )
    if cuda and not health.facts["torch"].get("cuda"):
        health.add_problem(
            f"{unit.name} holds CUDA sources, and torch was built without CUDA: their library cannot be loaded here",
            "install a torch with CUDA, or use the library on a machine that has one",
        )
    if python and not health.facts["python"]["headers"]:
        health.add_problem(
            f"{unit.name} needs Python.h",
            "apt install python3-dev, or include torch/library.h instead of torch/extension.h",
        )
    if not blocks:
        health.add_problem(
            f"{unit.name} registers no operator in its sources",
            "write STABLE_TORCH_LIBRARY(OPFORGE_NAMESPACE, m) { m.def(…); }, or check whether a macro hides it",
        )
    suffix = sysconfig.get_config_var("EXT_SUFFIX") if python else ".so"
    return {
        "name": unit.name, "sources": [os.path.relpath(file, unit.folder) for file in unit.files],
        "abi": "full" if full else "stable", "target": f"{unit.name}{suffix}",
        "namespaces": sorted({b.namespace for b in blocks}),
        "operators": sorted({f"{b.namespace}::{name}" for b in blocks for name in b.operators}),
    }  # fmt: skip


def _libraries(health: Health, paths: list[Path]) -> list[Facts]:
    if not paths or health.facts["torch"]["version"] is None:
        return [{"path": str(path)} for path in paths]
    looks = inspect.inspect_libraries([[path] for path in paths])
    for look in looks:
        if look.error:
            health.add_problem(
                f"{look.paths[0]} cannot be loaded: {look.error}", "build it again here, with `opforge build`"
            )
    for clash in clashes.clashes_of_libraries([look for look in looks if not look.error]):
        health.add_clash(clash)
    return [{"path": str(look.paths[0]), "operators": sorted(look.operators), "error": look.error} for look in looks]
