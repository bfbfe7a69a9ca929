"""A real Chromium for tests that look at pages, and folders of runs for them to look at."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CASE = "((T([1024, 1024], f32),), {})"
_ARGUMENTS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,900",
    "--no-first-run", "--disable-background-networking", "--disable-extensions",
)  # fmt: skip
_WITNESS = (
    "window.violations = []; addEventListener('securitypolicyviolation', (e) => violations.push(e.violatedDirective));"
)
"""Runs before a page's own script, and notes what its policy had to stop."""


@contextmanager
def chromium(profile: Path) -> Iterator[Any]:
    """Start Chromium; a test that needs it is skipped where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install selenium")
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no Chromium here: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in (*_ARGUMENTS, f"--user-data-dir={profile}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        browser.set_script_timeout(60)
        browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": _WITNESS})
        yield browser
    finally:
        browser.quit()


def texts(browser: Any, selector: str) -> list[str]:
    """Return the texts of elements, all at one moment: a page that follows a run makes its elements anew."""
    script = "return [...document.querySelectorAll(arguments[0])].map((element) => element.innerText)"
    found: list[str] = browser.execute_script(script, selector)
    return found


def manifest(kernels: dict[str, list[str]], cases: int, missing: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    """Return the manifest of a run of kernels, each with the operators that it serves."""
    rows = [
        {"name": k, "primary": ops[0], "file": None, "digest": "none", "ops": ops, "hints": []}
        for k, ops in kernels.items()
    ]
    operators = len({op for ops in kernels.values() for op in ops}) + len(missing)
    return {
        "opforge": 1, "command": ["opforge", "run"],
        "config": {"backend": "directory", "suite": "tiny", "device": "cpu", "p": 1.0, "ops": []},
        "versions": {"torch": "2.13.0", "triton": None}, "machine": {"device": "cpu", "platform": "Linux"},
        "started": "2026-01-01T00:00:00+00:00",
        "plan": {
            "cases": cases, "operators": operators, "missing": list(missing), "optional": [], "performance": [],
            "kernels": rows, "losses": [], "remarks": [],
        },
        **fields,
    }  # fmt: skip


def row(op: str, kernel: str, number: int = 0, verdict: str = "passed", **fields: Any) -> dict[str, Any]:
    """Return one line of results."""
    return {
        "suite": "tiny", "op": op, "kernel": kernel, "case": CASE, "source": "seen", "id": f"{abs(hash((op, number))):016x}"[:16],
        "phase": "correctness", "verdict": verdict, "reason": "", **fields,
    }  # fmt: skip


def timed(speedup: float, size: int = 1 << 20, **fields: Any) -> dict[str, Any]:
    """Return the fields of a timed case."""
    light = {"bytes": size, "flops": size // 4, "us": 1.0, "bound": "memory", "kernel": 40.0 * speedup, "aten": 40.0, "counted": "formula"}  # fmt: skip
    ends = {"speedup_low": speedup * 0.95, "speedup_high": speedup * 1.05}
    times = {"timed": "call", "kernel_us": 10.0, "aten_us": 10.0 * speedup, "rounds": 40}
    return {"phase": "performance", "speedup": speedup, **ends, **times, "sol": light, **fields}


def write_run(folder: Path, about: dict[str, Any], rows: list[dict[str, Any]]) -> Path:
    """Write a run's folder as `opforge run` does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(about))
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    return folder
