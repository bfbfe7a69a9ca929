"""Kernels as models write them, and runs that ask for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opforge.cases import Case, Phase
from opforge.generate.options import GenerationOptions
from opforge.runs import RunConfig, run
from opforge.runs.pipeline import RunResult
from opforge.suites.given import GivenSuite
from tests.generate.servers import AnthropicServer, ModelServer

KEY = "sk-ant-secret-of-the-test-0123456789"
RELU = (
    "import torch\n\n\ndef relu_kernel_impl(self):\n    return torch.where(self <= 0, torch.zeros_like(self), self)\n"
)
WRONG = RELU.replace("self <= 0", "self <= 1")
CHEAT = "import torch\n\n\ndef relu_kernel_impl(self):\n    return torch.relu(self)\n"
HANG = "import time\n\n\ndef relu_kernel_impl(self):\n    time.sleep(1000)\n"
KERNELS = Path(__file__).parent / "kernels"
TRITON = (KERNELS / "relu.py").read_text()
CASES = ["((T([3, 4], f32),), {})", "((T([4, 3], f32, stride=(1, 4)),), {})"]


def fenced(source: str, tag: str = "python") -> str:
    return f"Here it is.\n\n```{tag}\n{source}```\n"


class Making:
    """Runs in which a model at a loopback server writes the kernels."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def run(
        self,
        server: ModelServer,
        *,
        ops: tuple[str, ...] = ("relu.default",),
        timed: bool = False,
        resume: bool = False,
        **options: Any,
    ) -> RunResult:
        of_config = {"timeout_s": options.pop("timeout_s", 5.0), "confine": options.pop("confine", True)}
        provider = "anthropic" if isinstance(server, AnthropicServer) else "openai"
        asked = {"provider": provider, "url": server.url, "dsl": "pytorch", "rounds": 3, **options}
        cases = [Case.make(op, text) for op in ops for text in CASES]
        cases += [Case.make(op, CASES[0], phase=Phase.PERFORMANCE) for op in ops if timed]
        kernels = str(self.out / "generated_kernels")
        config = RunConfig(
            "given", "llm", ops_directory=kernels, generation=GenerationOptions(**asked).as_json(), **of_config
        )
        return run(config, self.out, suite=GivenSuite(cases), resume=resume)

    def text(self, path: str) -> str:
        return (self.out / "generation" / path).read_text()

    def files(self) -> Iterator[Path]:
        return (path for path in self.out.rglob("*") if path.is_file())


@pytest.fixture
def making(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Making]:
    """Return what runs with a model's kernels, in the real sandbox; no file that comes of it may hold the key."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    made = Making(tmp_path / "run")
    yield made
    assert not [path for path in made.files() if KEY.encode() in path.read_bytes()]
