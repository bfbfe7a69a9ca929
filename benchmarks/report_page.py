"""The page of a large run: its size, how long it takes to make, to be seen, to be searched; and pictures of it.

    python benchmarks/report_page.py [--operators 1000] [--cases 50] [--repeats 5]
    python benchmarks/report_page.py --pictures docs/images

The run is made up: verdicts, errors, times and sources of the kind that real runs have, drawn from a seed. Times in the browser are taken
in Chromium (chromium and chromedriver must be there), opened from the file, with nothing cached.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opforge.reports.page import PAGE_FILE, write_page
from opforge.runs.score import Summary
from opforge.runs.store import read_manifest, read_rows

NAMES = (
    "add",
    "sub",
    "mul",
    "div",
    "relu",
    "gelu",
    "silu",
    "softmax",
    "sum",
    "mean",
    "mm",
    "bmm",
    "layer_norm",
    "exp",
    "log",
    "cat",
    "sort",
)
FAILURES = {
    "wrong": "result: {} of {} elements: error {:.3g}, allowed 1.2e-06 (ATen's own 2.1e-08); first at [0, 1]: got 0.4353, ATen has 0.4355",
    "contract": "result: strides ({}, {}) cannot be viewed flat, as ATen's can; in {:.1f} of its variants",
    "crashed": "the kernel's process was killed by SIGSEGV after {} of {} cases and {:.1f} s",
}
SOURCE = '''"""A kernel of number {number}."""

import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    tl.store(out + at, value * {number} + {seed:.6f}, mask=at < n)  # {name}


def {name}_kernel_impl(self):
    out = torch.empty_like(self)
    n = self.numel()
    _kernel[(triton.cdiv(n, 1024),)](self, out, n, BLOCK=1024)
    return out
'''


def rows_of(op: str, kernel: str, count: int, draw: random.Random) -> Iterator[dict[str, Any]]:
    """Yield the lines of an operator: one in eight operators has failures, one case in five is timed."""
    bad = draw.choice(list(FAILURES)) if draw.random() < 0.12 else ""
    level, slope = draw.lognormvariate(0.1, 0.35), draw.uniform(-0.03, 0.05)
    for number in range(count):
        side = 2 ** draw.randint(2, 11)
        case = f"((T([{side}, {draw.choice([16, 33, 128, 1024])}], {draw.choice(['f32', 'bf16', 'f16'])}, at={number * 4096}),), {{}})"
        head = {"suite": "made up", "op": op, "kernel": kernel, "case": case, "source": f"{op} forward"}
        line = head | {"id": f"{draw.getrandbits(64):016x}", "phase": "correctness", "verdict": "passed", "reason": ""}
        bound = 10 ** draw.uniform(-8, -3)
        line |= {"kernel_error": bound * 10 ** draw.uniform(-4, -0.3), "aten_error": bound / 20, "bound": bound}
        line["variants"] = draw.sample(["transposed", "strided", "offset", "nan", "inf", "extremes", "empty"], 3)
        if number % 5 == 4:
            line |= _timed(side, level * side**slope, draw)
        if bad and draw.random() < 0.3:
            line |= {"verdict": bad, "reason": FAILURES[bad].format(draw.randint(1, 99), 528, draw.uniform(1e-4, 1))}
            line["kernel_error"] = bound * 10 ** draw.uniform(0.1, 4)
        yield line


def _timed(side: int, speedup: float, draw: random.Random) -> dict[str, Any]:
    size, width = side * 8192, draw.uniform(1.005, 1.06)
    light_us = size / 2e4
    aten = draw.uniform(15, 80)
    kernel = min(95.0, aten * speedup)
    light = {
        "bytes": size,
        "flops": size // draw.choice([8, 4, 1]),
        "us": light_us,
        "bound": "memory",
        "kernel": kernel,
        "aten": aten,
    }
    times = {"timed": "call", "kernel_us": light_us / kernel * 100, "aten_us": light_us / aten * 100, "rounds": 40}
    ends = {"speedup_low": speedup / width, "speedup_high": speedup * width}
    return {"phase": "performance", "speedup": speedup, **ends, **times, "sol": light | {"counted": "formula"}}


def make_run(folder: Path, operators: int, cases: int) -> None:
    """Write the folder of a run as `opforge run` does."""
    draw = random.Random(0)
    kernels = []
    with (folder / "results.jsonl").open("w") as handle:
        for number in range(operators):
            base = NAMES[number % len(NAMES)]
            op, kernel = f"{base}.overload_{number}", f"{base}_implementation_{number}"
            file = folder / "kernels" / f"{kernel}.py"
            file.parent.mkdir(exist_ok=True)
            file.write_text(SOURCE.format(number=number, seed=draw.random(), name=base))
            digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
            kernels.append(
                {"name": kernel, "primary": op, "file": str(file), "digest": digest, "ops": [op], "hints": []}
            )
            handle.writelines(json.dumps(line) + "\n" for line in rows_of(op, kernel, cases, draw))
    plan = {"cases": operators * cases, "operators": operators + 20, "missing": [f"missing.op_{n}" for n in range(20)]}
    plan |= {
        "optional": [],
        "performance": [k["primary"] for k in kernels],
        "kernels": kernels,
        "losses": [],
        "remarks": [],
    }
    config = {"backend": "directory", "suite": "made up", "device": "cpu", "p": 1.0, "ops": []}
    peaks = {"device": "a CPU", "bandwidth": [[65536, 1.2e11], [1 << 27, 2e10]], "rates": {"f32 product": 1.5e11}}
    manifest = {"opforge": 1, "command": ["opforge", "run"], "config": config, "plan": plan, "peaks": peaks}
    manifest |= {"versions": {"torch": "2.13.0"}, "machine": {"device": "cpu", "platform": "Linux"}}
    manifest |= {"started": "2026-01-01T00:00:00+00:00", "finished": "2026-01-01T01:00:00+00:00"}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def browser(profile: Path) -> Any:
    """Start Chromium."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1280,800",
    ):
        options.add_argument(word)
    options.add_argument(f"--user-data-dir={profile}")
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


PAINT = """
const done = arguments[arguments.length - 1];
new PerformanceObserver((list) => {
  const first = list.getEntries().find((entry) => entry.name === "first-contentful-paint");
  if (first) done(first.startTime);
}).observe({ type: "paint", buffered: true });
"""
LOADED = "return performance.getEntriesByType('navigation')[0].loadEventEnd"
WORK = """
const done = arguments[arguments.length - 1], began = performance.now();
{work}
const scripted = performance.now() - began;
requestAnimationFrame(() => setTimeout(() => done([scripted, performance.now() - began])));
"""
SEARCH = "const s = document.getElementById('search'); s.value = s.value ? '' : 'softmax'; s.dispatchEvent(new Event('input'));"
SORT = "document.querySelector('.head .c-speedup button').click();"
SCROLL = "scrollTo(0, Math.random() * document.body.scrollHeight);"
OPEN = """
const done = arguments[arguments.length - 1], began = performance.now();
document.querySelector('#rows .row').click();
const look = () => (document.querySelector('dialog .case') ? done(performance.now() - began) : requestAnimationFrame(look));
look();
"""
CHART = """
const done = arguments[arguments.length - 1], began = performance.now();
document.getElementById('errors').open = true;
const look = () => (document.querySelector('#errors path.dots') ? done(performance.now() - began) : requestAnimationFrame(look));
look();
"""


def in_browser(page: Path, repeats: int) -> dict[str, list[float]]:
    """Return what was measured in the browser, in milliseconds."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as profile:
        chromium = browser(Path(profile))
        try:
            for _ in range(repeats):
                chromium.get("about:blank")
                chromium.get(page.as_uri())
                found.setdefault("first paint", []).append(chromium.execute_async_script(PAINT))
                found.setdefault("whole page loaded", []).append(chromium.execute_script(LOADED))
                for name, work in (("search", SEARCH), ("sort", SORT), ("scroll", SCROLL)):
                    scripted, shown = chromium.execute_async_script(WORK.format(work=work))
                    found.setdefault(f"{name}: script", []).append(scripted)
                    found.setdefault(f"{name}: until shown", []).append(shown)
                found.setdefault("open an operator", []).append(chromium.execute_async_script(OPEN))
                chromium.execute_script("document.getElementById('detail').close()")
                found.setdefault("chart of all errors", []).append(chromium.execute_async_script(CHART))
        finally:
            chromium.quit()
    return found


def pictures(page: Path, into: Path) -> None:
    """Take the pictures of the documentation: light, dark, and a phone's."""
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        chromium = browser(Path(profile))
        try:
            for name, wide, tall, dark, script in (
                ("page-light", 1200, 900, False, "document.querySelector('.head .c-speedup button').click()"),
                ("page-dark", 1200, 800, True, "document.querySelectorAll('#rows .row')[0].click()"),
                ("page-phone", 390, 800, False, "document.getElementById('table').scrollIntoView()"),
            ):
                size = {"width": wide, "height": tall, "deviceScaleFactor": 1, "mobile": wide < 500}
                features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
                chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
                chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
                chromium.get("about:blank")
                chromium.get(page.as_uri())
                chromium.execute_script(script)
                time.sleep(1)
                chromium.save_screenshot(str(into / f"{name}.png"))
                print(f"{into / name}.png: {(into / f'{name}.png').stat().st_size / 1024:.0f} KiB")
        finally:
            chromium.quit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", type=int, default=1000)
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--pictures", type=Path, help="take pictures of a small run into this folder, and measure nothing"
    )
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if words.pictures:
            make_run(folder, 60, 50)
            write_page(folder, read_manifest(folder), Summary.from_rows(read_manifest(folder), read_rows(folder)))
            pictures(folder / PAGE_FILE, words.pictures)
            return
        make_run(folder, words.operators, words.cases)
        manifest = read_manifest(folder)
        summary = Summary.from_rows(manifest, read_rows(folder))
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, (time.perf_counter(), time.process_time())
        write_page(folder, manifest, summary)
        took, used = time.perf_counter() - began[0], time.process_time() - began[1]
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        lines = (folder / "results.jsonl").stat().st_size / 2**20
        print(f"{words.operators} operators × {words.cases} cases; results.jsonl {lines:.1f} MiB")
        print(f"{'size of the page':32}{(folder / PAGE_FILE).stat().st_size / 2**20:10.2f} MiB")
        print(f"{'time to make it':32}{took:10.2f} s, {used:.2f} s of a core")
        print(f"{'memory that making it added':32}{grown:10.0f} MiB")
        print(f"{'in Chromium (median, worst)':32}{'ms':>10}{'ms':>10}   of {words.repeats}")
        for name, values in in_browser(folder / PAGE_FILE, words.repeats).items():
            print(f"{name:32}{statistics.median(values):10.1f}{max(values):10.1f}")


if __name__ == "__main__":
    main()
