"""Import the target of a check, and find the operators it registers."""

from __future__ import annotations

import contextlib
import faulthandler
import fnmatch
import gc
import importlib
import json
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from opforge import cache
from opforge.check.check_request import CheckTarget
from opforge.errors import InternalError, NothingToJudgeError, OpforgeError, UnknownNameError
from opforge.frames import is_from_opforge, is_from_torch, is_import_system, is_user_file, torch_folder
from opforge.imports import run_file
from opforge.procs.forks import Send, run_fork

_IMPORT_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class LoadedTarget:
    """An imported target."""

    operators: list[str]
    package: str
    """Name of the imported module."""
    interpreted: bool
    """Whether Triton kernels run in the interpreter."""
    notes: list[str]


def load_target(target: CheckTarget, device: str, patterns: Sequence[str]) -> LoadedTarget:
    """Import a target, and select the wanted operators among those it registers."""
    import torch

    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    before, kernels = _operator_names(), _count_interpreted_kernels()
    sys.path[:0] = target.paths
    faulthandler.dump_traceback_later(_IMPORT_TIMEOUT_S, exit=True)
    with _recording_cuda_starts() as starts:
        package = _import_target(target)
    faulthandler.cancel_dump_traceback_later()
    after = _operator_names()
    if device != "cpu" and torch.cuda.is_initialized():
        raise OpforgeError(
            f"importing {target.text} starts CUDA{starts[0] if starts else ''}, and processes forked after that "
            "cannot use it; "
            "let the package touch the GPU when an operator is called, not when it is imported"
        )
    notes = []
    if interpreted and _count_interpreted_kernels() > kernels:
        notes.append("Triton kernels run in its interpreter (TRITON_INTERPRET=1)")
    if target.operator:
        return LoadedTarget(_select_operators([target.operator], after), package, interpreted, notes)
    torchs_own = {name for name in after - before if _is_registered_by_torch(name)}
    owners = {name: _installed_package(name) for name in after - before - torchs_own}
    others = Counter(owner for owner in owners.values() if owner not in ("", package.partition(".")[0]))
    notes += [
        f"not checked: {count} operators that {owner} registers, which {target.text} imports; to check them: opforge "
        f"check {owner}"
        for owner, count in others.items()
    ]
    registered = {name for name, owner in owners.items() if owner not in others}
    if torchs_own:
        namespaces = Counter(name.partition("::")[0] for name in torchs_own)
        places = ", ".join(f"{namespace} {count}" for namespace, count in namespaces.most_common())
        notes.append(
            f"not checked: {len(torchs_own)} operators that torch itself registers, in modules that {target.text} "
            f"imports ({places}); name one to check it: opforge check {min(torchs_own)} --import {target.text}"
        )
    if not registered:
        raise NothingToJudgeError(
            f"importing {target.text} registers no operator"
            f"{f' but {len(torchs_own)} of torch' if torchs_own else ''}"
            f"{' and those of other packages' if others else ''}; give the module that does (it may be a "
            f"submodule), or an operator by name: ns::op --import {target.text}"
        )
    return LoadedTarget(_select_operators(patterns, registered), package, interpreted, notes)


@contextlib.contextmanager
def _recording_cuda_starts() -> Iterator[list[str]]:
    """List the places where CUDA is initialised within the block."""
    import torch

    starts: list[str] = []
    start = torch.cuda._lazy_init  # noqa: SLF001  # torch has no public hook for it

    def noting() -> None:
        if not torch.cuda.is_initialized():
            frames = [f for f in traceback.extract_stack()[:-1] if not _is_import_frame(f.filename)]
            outside = [f for f in frames if not is_from_torch(f.filename)] or frames
            starts.append(f" at {outside[-1].filename}:{outside[-1].lineno}")
        start()

    torch.cuda._lazy_init = noting  # noqa: SLF001
    try:
        yield starts
    finally:
        torch.cuda._lazy_init = start  # noqa: SLF001


def _operator_names() -> set[str]:
    import torch

    return set(torch._C._dispatch_get_all_op_names())  # noqa: SLF001  # torch has no public list of operators


def preload_compiler() -> None:
    """Import the modules that torch's compiler and opcheck need, once for all checks of a target."""
    for name in _compiler_modules():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import torch

    if torch.cuda.is_initialized():
        raise InternalError("importing torch's compiler started CUDA, and processes forked after that cannot use it")


def _compiler_modules() -> list[str]:
    """Return the modules imported by opcheck and the compiler; a fork finds them once per torch."""
    import torch.testing._internal.optests

    cache_file = cache.root() / "checking" / f"modules-{cache.torch_version()}.json"
    cached = cache.read_json(cache_file)
    if isinstance(cached, list):
        return [str(name) for name in cached]

    def look(_send: Send) -> list[str]:
        before = set(sys.modules)
        torch.library.opcheck(torch.ops.aten.sin.default, (torch.ones(2, requires_grad=True),))
        torch.compile(torch.sin, backend="aot_eager", fullgraph=True, dynamic=True)(torch.ones(3))
        new = [name for name in sys.modules if name not in before]  # in an order without cycles
        return [name for name in new if name.partition(".")[0] in ("torch", "sympy")]

    modules: list[str] = run_fork(look, _IMPORT_TIMEOUT_S).answer or []
    if modules:
        with contextlib.suppress(OSError):
            cache.write_atomically(cache_file, json.dumps(modules))
    return modules


def _import_target(target: CheckTarget) -> str:
    """Import the target's module or run its file; return the module's name."""
    try:
        if target.file:
            return _run_file(Path(target.file))
        if target.module:
            importlib.import_module(target.module)
    except BaseException as error:  # code of the user: it may even exit
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_import_frame(f.filename)]
        users = [f for f in frames if is_user_file(f.filename)] or frames
        where = f" at {users[-1].filename}:{users[-1].lineno}" if users else ""
        raise OpforgeError(f"importing {target.text} raises {type(error).__name__}{where}: {error}") from error
    return target.module


def _is_import_frame(filename: str) -> bool:
    return is_from_opforge(filename) or is_import_system(filename)


def _run_file(file: Path) -> str:
    name = file.stem if file.stem.isidentifier() and file.stem not in sys.modules else "_opforge_checked_file"
    run_file(file, name)
    return name


def _count_interpreted_kernels() -> int:
    """Count the Triton kernels that run in the interpreter."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    return 0 if interpreter is None else sum(type(o) is interpreter.InterpretedFunction for o in gc.get_objects())


def _select_operators(patterns: Sequence[str], names: set[str]) -> list[str]:
    """Select operators by patterns, or by names with or without namespace and overload."""
    if not patterns:
        return sorted(names)
    chosen: set[str] = set()
    for pattern in patterns:
        matches = {name for name in names if any(fnmatch.fnmatchcase(form, pattern) for form in _spellings(name))}
        if not matches:
            hint = "say what registers it with --import" if "::" in pattern else ""
            raise UnknownNameError("operator", pattern, names, hint)
        chosen |= matches
    return sorted(chosen)


def _spellings(name: str) -> tuple[str, ...]:
    base = name.partition(".")[0]
    default = () if "." in name else (f"{name}.default",)
    return (name, base, name.partition("::")[2], base.partition("::")[2], *default)


def _installed_package(name: str) -> str:
    """Return the package beside torch that registered an operator from Python; empty if it is not known."""
    from torch._library.custom_ops import OPDEFS

    if name in OPDEFS:
        code = getattr(OPDEFS[name]._init_fn, "__code__", None)  # noqa: SLF001  # torch has no public name
        place = "" if code is None else str(code.co_filename)
    else:
        place = next(iter(_registration_places(name)), "")
    packages = torch_folder().parent
    if not place or is_from_torch(place) or not Path(place).resolve().is_relative_to(packages):
        return ""
    return Path(place).resolve().relative_to(packages).parts[0].removesuffix(".py")


def _is_registered_by_torch(name: str) -> bool:
    """Whether torch itself registered an operator, in a module imported because of the target."""
    from torch._library.custom_ops import OPDEFS

    if name in OPDEFS:
        module = str(getattr(OPDEFS[name]._init_fn, "__module__", ""))  # noqa: SLF001  # torch has no public name
        # torch._library.triton: a user's triton_op
        return module.partition(".")[0] in ("torch", "functorch") and module != "torch._library.triton"
    by_users = [torch_folder() / name for name in ("library.py", "_library", "_custom_op", "_custom_ops.py")]
    return any(
        is_from_torch(p) and not any(Path(p).resolve().is_relative_to(path) for path in by_users)
        for p in _registration_places(name)
    )


def _registration_places(name: str) -> list[str]:
    """Return the files in which an operator is defined; none if only kernels are registered for it."""
    import torch

    try:
        lines = torch._C._dispatch_dump(name).splitlines()  # noqa: SLF001  # torch has no public name
    except RuntimeError:
        return []
    return [match[1] for line in lines if (match := re.fullmatch(r"debug: registered at (.+):\d+", line))]
