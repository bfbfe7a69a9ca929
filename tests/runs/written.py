"""Runs written by hand: folders as a run leaves them, with the verdicts and times that a test wants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CASE = "((T([{}], f32),), {{}})"


def verdict(op: str, verdict: str = "passed", *, number: int = 0, **fields: Any) -> dict[str, Any]:
    """Return a line for a case that is judged and not timed."""
    row = {"suite": "tiny", "op": op, "kernel": f"{op.partition('.')[0]}_1", "case": CASE.format(number), "source": ""}
    more = {
        "id": f"{op}{number}",
        "phase": "correctness",
        "verdict": verdict,
        "reason": "" if verdict == "passed" else "because",
    }
    return {**row, **more, **fields}


def timed(op: str, speedup: float, *, within: float = 0.01, number: int = 0, **fields: Any) -> dict[str, Any]:
    """Return a line for a timed case whose interval goes so far to either side."""
    ends = {"speedup_low": speedup * (1 - within), "speedup_high": speedup * (1 + within)}
    times = {"timed": "call", "kernel_us": 10.0 / speedup, "aten_us": 10.0, "speedup": speedup, **ends, "rounds": 40}
    return verdict(op, number=number, phase="performance", **{**times, **fields})


def manifest(rows: list[dict[str, Any]], **plan: Any) -> dict[str, Any]:
    """Return the manifest of a run with such results."""
    ops = sorted({row["op"] for row in rows})
    digests = plan.pop("digests", {})
    top = {name: plan.pop(name) for name in ("versions", "config", "machine") if name in plan}
    kernels = [
        {
            "name": row["kernel"],
            "primary": row["op"],
            "file": f"/kernels/{row['kernel']}.py",
            "ops": [row["op"]],
            "hints": [],
        }
        | {"digest": digests.get(row["op"], "same")}
        for row in {row["op"]: row for row in rows}.values()
    ]
    return {
        "opforge": 1,
        "command": ["opforge", "run"],
        "config": {"suite": "tiny", "backend": "directory", "device": "cpu", "ops": [], "dtypes": ["f32"], "p": 1.0}
        | top.get("config", {}),
        "versions": {"opforge": "0.1.0", "torch": "2.13.0", "triton": None, "numpy": "2.0", "python": "3.11.7"}
        | top.get("versions", {}),
        "machine": {
            "platform": "Linux",
            "processor": "x86_64",
            "device": "cpu",
            "name": "A CPU",
            "overridden_by_torch": [],
        }
        | top.get("machine", {}),
        "started": "2026-01-01T00:00:00+00:00",
        "finished": "2026-01-01T00:01:00+00:00",
        "peaks": {"device": "A CPU"},
        "plan": {
            "suite": "tiny",
            "suite_digest": "d1",
            "cases": len(rows),
            "operators": len(ops) + len(plan.get("missing", [])),
            "missing": [],
            "optional": [],
            "performance": sorted({row["op"] for row in rows if row["phase"] == "performance"}),
            "kernels": kernels,
            "sources": {},
            "losses": [],
            "remarks": [],
            **plan,
        },
    }


def write(path: Path, rows: list[dict[str, Any]], *, unfinished: bool = False, **plan: Any) -> Path:
    """Write a run's folder and return it."""
    path.mkdir(parents=True)
    made = manifest(rows, **plan)
    if unfinished:
        del made["finished"]
    (path / "manifest.json").write_text(json.dumps(made))
    (path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
