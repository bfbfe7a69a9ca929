"""Time a short command with a server of its own and with a warm one, taking turns."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from opforge.models.judge import MODEL_ROLES
from opforge.runs.execute.judge_pool import device_settings
from opforge.sandbox.host.client import SERVER_VARIABLE
from opforge.sandbox.host.warm import warm_server

COMMANDS = {
    "judge one case": ("run", "--suite", "GIVEN", "--backend", "aten"),
    "run --suite smoke (judged and timed)": ("run", "--suite", "smoke", "--backend", "aten"),
}
CASE = "Operator: aten.relu.default\ncnt: 1, ((T([3, 4], f32),), {})\n"


def seconds(words: tuple[str, ...], folder: Path, environment: dict[str, str]) -> float:
    """Run a command of opforge; return how long it took."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        command = [sys.executable, "-m", "opforge.cli", *words, "--out", f"{out}/run"]
        began = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, env=environment)
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    own = {name: value for name, value in os.environ.items() if name != SERVER_VARIABLE}
    print(f"median of {options.rounds} rounds, {options.device}\n{'command':40}  own server  warm server  ratio")
    with (
        tempfile.TemporaryDirectory() as folder,
        warm_server("", MODEL_ROLES, device_settings(options.device)) as (path, server),
    ):
        given = Path(folder) / "given.txt"
        given.write_text(CASE)
        _ = server.spawner  # wait until it has imported torch
        for label, shown in COMMANDS.items():
            words = (*(str(given) if word == "GIVEN" else word for word in shown), "--device", options.device)
            times = [
                (seconds(words, given.parent, own), seconds(words, given.parent, {**own, SERVER_VARIABLE: path}))
                for _ in range(options.rounds)
            ]
            cold, warm = (statistics.median(column) for column in zip(*times, strict=True))
            print(f"{label:40}  {cold:8.2f} s  {warm:9.2f} s  {cold / warm:5.1f}")


if __name__ == "__main__":
    main()
