"""Generate the C++ that registers the selected kernels, with ExecuTorch's code generator."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from opforge.edge import toolchain
from opforge.edge.bindings import BindingError
from opforge.edge.selection import Selection
from opforge.errors import NothingToJudgeError, OpforgeError

TEMPLATES = Path(__file__).parent / "templates" / "codegen"
"""Templates for the generator. The wheel has the generator but not its templates."""
SOURCE_NAME = "RegisterCodegenUnboxedKernels_0.cpp"
_CODEGEN_LIMIT_S = 120.0
_REGISTRATION_PATTERN = re.compile(r'^\s*Kernel\(\s*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class GeneratedCode:
    """The generated registration."""

    source: Path
    folder: Path
    """Folder of the generated headers."""
    operators: tuple[str, ...]
    """The operators that the source registers."""


def generate_registration(bindings: Path, selection: Selection, folder: Path) -> GeneratedCode:
    """Generate the registration of the selected operators in a folder.

    Raises if it does not register exactly these.
    """
    if not selection.names:
        raise NothingToJudgeError(
            f"no operator of {bindings} is selected ({selection.origin}); there is nothing to build"
        )
    toolchain.find_executorch()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    chosen, empty = folder / "selected_operators.yaml", folder / "aten.yaml"
    empty.write_text("[]\n")
    _run("executorch.codegen.tools.gen_oplist", "--output_path", str(chosen), f"--root_ops={','.join(selection.names)}")
    _run(
        "executorch.codegen.gen", "--source-path", str(TEMPLATES), "--install-dir", str(folder),
        "--tags-path", str(toolchain.tags_file()), "--aten-yaml-path", str(empty),
        "--op-selection-yaml-path", str(chosen), "--functions-yaml-path", str(bindings),
    )  # fmt: skip
    (folder / "RegisterCodegenUnboxedKernelsEverything.cpp").unlink(missing_ok=True)  # a copy of the same
    source = folder / SOURCE_NAME
    return GeneratedCode(source, folder, _registered_operators(source, selection.names))


def _registered_operators(source: Path, selected: Sequence[str]) -> tuple[str, ...]:
    """Return the operators that a source registers; raise if they are not the selected ones.

    The generator silently leaves out operators that it does not know.
    """
    registered = tuple(_REGISTRATION_PATTERN.findall(source.read_text()))
    if missing := sorted(set(selected) - set(registered)):
        raise BindingError(
            f"code generation omitted {', '.join(missing)}, which is selected; check the entry in the YAML file"
        )
    if unexpected := sorted(set(registered) - set(selected)):
        raise BindingError(f"code generation registers {', '.join(unexpected)}, which is not selected")
    if len(registered) != len(set(registered)):
        raise BindingError(f"code generation registers an operator twice: {', '.join(registered)}")
    return registered


def _run(module: str, *arguments: str) -> None:
    command = [sys.executable, "-P", "-m", module, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CODEGEN_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise OpforgeError(f"{module} did not finish within {_CODEGEN_LIMIT_S:g} s") from None
    if done.returncode:
        last_line = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise BindingError(f"ExecuTorch's code generation ({module}) failed; output: {last_line}")
