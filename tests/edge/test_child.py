"""Steps of the child process: the table, the messages, and errors."""

from __future__ import annotations

import importlib
import io
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from opforge.edge.build import Definitions, compare_schemas
from opforge.edge.child import STEPS, ChildError, Message, ask
from opforge.edge.export import ExportRequest
from opforge.edge.run import ForkAnswer, ForkReport, ForkReports, JobList, ProgramJob, ProgramOutput
from opforge.errors import OpforgeError
from opforge.models.target import ModelTarget
from opforge.procs.child import read_messages, send


@pytest.mark.parametrize("name", STEPS)
def test_a_step_takes_a_message_and_returns_one(name):
    hints = get_type_hints(getattr(importlib.import_module(STEPS[name]), name))
    assert sorted(hints) == ["question", "return"]
    assert all(issubclass(kind, Message) for kind in hints.values())


def test_the_parent_imports_no_torch():
    modules = ", ".join(sorted({*STEPS.values(), "opforge.edge.init", "opforge.edge.runner"}))
    source = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source], check=False).returncode == 0


OUTPUTS = (ProgramOutput("T([2], f32)", (2,), "f32", (1.0, 2.5)), ProgramOutput(value=3))


@pytest.mark.parametrize(
    "message",
    [
        ExportRequest(
            ModelTarget("net.py", file="net.py", function="model"), {"x": {0: (1, 8)}}, True, Path("net.pte")
        ),
        JobList((ProgramJob(Path("net.pte"), (Path("a.so"),), non_tensors=(None, 2)),), (Path("0"),)),
        ForkReports((ForkReport(ForkAnswer(OUTPUTS, "inputs", 0.5), 0, False, "results", ""),)),
    ],
)
def test_a_message_survives_the_way(message):
    send(pipe := io.BytesIO(), message.wire())
    ((row, _),) = read_messages(io.BytesIO(pipe.getvalue()))
    assert type(message).from_wire(row) == message


def test_a_value_that_is_not_json_is_refused():
    with pytest.raises(TypeError):
        send(io.BytesIO(), {"value": 1j})


def test_a_step_that_takes_too_long_is_ended(tmp_path):
    (tmp_path / "ops.py").write_text("import time; time.sleep(300)")
    with pytest.raises(ChildError, match=r"importing it: its process was stopped after 0\.1 s without a result"):
        ask(compare_schemas, Definitions(tmp_path / "ops.py", ()), label="importing it", limit_s=0.1)


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        ("raise ValueError('no')", OpforgeError, "ValueError: no"),
        ("import os\nprint('almost', flush=True)\nos._exit(3)", ChildError, "(?s)importing it: its process .*almost"),
    ],
)
def test_errors_and_the_end_of_the_process_are_told(tmp_path, source, error, said):
    (tmp_path / "ops.py").write_text(source)
    with pytest.raises(error, match=said):
        ask(compare_schemas, Definitions(tmp_path / "ops.py", ()), label="importing it")
