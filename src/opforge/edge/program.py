"""Read a ``.pte``: its operators, and from a run's event trace the kernels that ran.

Needs no torch.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from opforge.edge import toolchain
from opforge.errors import OpforgeError
from opforge.procs import linux
from opforge.procs.child import run_command

_DECODE_LIMIT_S = 60.0
_READ_LIMIT_S = 60.0
_MAGIC = slice(4, 6)
_READER_SOURCE = """
import json, sys
import torch  # its libraries are those of the next module
from executorch.extension.pybindings import _C as runtime
from executorch.codegen.tools.selective_build import _get_program_from_buffer, _get_program_operators
data = open(sys.argv[1], "rb").read()
try:
    runtime._load_program_from_buffer(data, program_verification=runtime.Verification.InternalConsistency)
except RuntimeError:
    sys.exit("the runtime's verifier refuses it: it is cut off or damaged; export it again")
print(json.dumps(sorted(set(_get_program_operators(_get_program_from_buffer(data))))))
"""


def program_operators(model: Path) -> list[str]:
    """Return the names of all operators that a ``.pte`` calls.

    The program is verified first: the reader trusts its input, and would read past the end of a
    truncated program. Both happen in a child process.
    """
    check_program(model)
    command = [sys.executable, "-P", "-c", _READER_SOURCE, str(model)]
    done = run_command(command, label=f"reading {str(model)!r}", limit_s=_READ_LIMIT_S)
    if done.returncode:
        outcome = linux.describe_returncode(done.returncode)
        last_line = (done.stderr.strip().splitlines() or [""])[-1]
        raise OpforgeError(
            f"{str(model)!r} cannot be read as a program of ExecuTorch: its reader {outcome}. {last_line}".rstrip()
        )
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return names


def check_program(model: Path) -> None:
    """Raise if a file is not a ``.pte``, before anything trusts it."""
    try:
        with model.open("rb") as handle:
            head = handle.read(8)
    except OSError as error:
        raise OpforgeError(
            f"{str(model)!r} cannot be read: {error.strerror}; `opforge edge export` makes a .pte"
        ) from None
    if head[_MAGIC] != b"ET":
        raise OpforgeError(
            f"{str(model)!r} is not a program of ExecuTorch: a .pte has ET at byte 4; `opforge edge export` makes one"
        )


def kernel_calls(program: Path, trace: Path) -> dict[str, int]:
    """Return how often each operator's kernel ran, by the operator's full name.

    An event has the kernel's name without its namespace. The event's instruction has the full name.
    """
    package = toolchain.find_executorch()
    etdump = package.path / "devtools" / "etdump" / "etdump_schema_flatcc.fbs"
    plan = _decode_flatbuffer(package.path / "schema" / "program.fbs", program, "--raw-binary")["execution_plan"][0]
    events = _decode_flatbuffer(etdump, trace, "--size-prefixed")
    called: Counter[str] = Counter()
    for run in events.get("run_data", []):
        for event in run.get("events", []):
            profile = event.get("profile_event") or {}
            operator = _operator(plan, profile)
            if operator and profile.get("name") == f"native_call_{operator.partition('::')[2]}":
                called[operator] += 1
    return dict(called)


def _operator(plan: dict[str, Any], event: dict[str, Any]) -> str:
    """Return the operator of an event's instruction; empty if there is none."""
    chain, number = event.get("chain_index", -1), event.get("instruction_id", -1)
    if not 0 <= chain < len(plan["chains"]) or not 0 <= number < len(plan["chains"][chain]["instructions"]):
        return ""
    instruction = plan["chains"][chain]["instructions"][number]
    if instruction["instr_args_type"] != "KernelCall":
        return ""
    operator = plan["operators"][instruction["instr_args"]["op_index"]]
    return f"{operator['name']}.{operator['overload']}" if operator.get("overload") else str(operator["name"])


def _decode_flatbuffer(schema: Path, data: Path, kind: str) -> dict[str, Any]:
    """Decode a file of ExecuTorch with the flatc of its package."""
    flatc = toolchain.find_executorch().path / "data" / "bin" / "flatc"
    for needed in (flatc, schema):
        if not needed.is_file():
            raise OpforgeError(
                f"executorch has no {needed}, which reads its traces; install it again: `{toolchain.INSTALL_COMMAND}`"
            )
    with tempfile.TemporaryDirectory() as place:
        command = [str(flatc), "--json", "--defaults-json", "--strict-json", kind, "-o", place, str(schema), "--"]
        command.append(str(data))
        done = run_command(command, label=f"decoding {str(data)!r}", limit_s=_DECODE_LIMIT_S)
        outputs = list(Path(place).glob("*.json"))
        if done.returncode or not outputs:
            raise OpforgeError(f"{str(data)!r} cannot be decoded: {done.stderr.strip() or done.stdout.strip()}")
        decoded: dict[str, Any] = json.loads(outputs[0].read_text())
    return decoded
