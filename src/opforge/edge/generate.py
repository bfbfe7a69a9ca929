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
from opforge.edge.operators import BindingError
from opforge.edge.selection import Selection
from opforge.errors import NothingToJudgeError, OpforgeError

TEMPLATES = Path(__file__).parent / "templates" / "codegen"
"""Templates for the generator. The wheel has the generator but not its templates."""
SOURCE = "RegisterCodegenUnboxedKernels_0.cpp"
_LIMIT_S = 120.0
_REGISTERED = re.compile(r'^\s*Kernel\(\s*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Generated:
    """The generated registration."""

    source: Path
    folder: Path
    """Folder of the generated headers."""
    operators: tuple[str, ...]
    """The operators that the source registers."""


def generate(bindings: Path, selection: Selection, folder: Path) -> Generated:
    """Generate the registration of the selected operators in a folder.

    Raises if it does not register exactly these.
    """
    if not selection.names:
        raise NothingToJudgeError(
            f"no operator of {bindings} is selected ({selection.origin}); there is nothing to build"
        )
    toolchain.executorch()
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
    source = folder / SOURCE
    return Generated(source, folder, _verified(source, selection.names))


def _verified(source: Path, wanted: Sequence[str]) -> tuple[str, ...]:
    """Return the operators that a source registers; raise if they are not the selected ones.

    The generator silently leaves out operators that it does not know.
    """
    found = tuple(_REGISTERED.findall(source.read_text()))
    if lost := sorted(set(wanted) - set(found)):
        raise BindingError(
            f"code generation left out {', '.join(lost)}, though selected; look at the entry in the YAML file"
        )
    if more := sorted(set(found) - set(wanted)):
        raise BindingError(f"code generation registers {', '.join(more)}, though not selected")
    if len(found) != len(set(found)):
        raise BindingError(f"code generation registers an operator twice: {', '.join(found)}")
    return found


def _run(module: str, *words: str) -> None:
    command = [sys.executable, "-P", "-m", module, *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise OpforgeError(f"{module} was ended after {_LIMIT_S:g} s without having finished") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise BindingError(f"ExecuTorch's code generation ({module}) failed; it said: {said}")
