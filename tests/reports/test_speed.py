"""What reports say of times: speedups with intervals, light, what is launch-bound, alarms, the machine; of older runs too."""

from __future__ import annotations

import csv
import io
import json

import pytest
from rich.console import Console

from opforge.cli.main import call
from opforge.reports import kernel_times, terminal
from opforge.reports.run_files import summary_markdown
from opforge.runs.manifest import Manifest
from opforge.runs.rows import ResultRow
from opforge.runs.score import Summary

CASE = "((T([1024, 1024], f32),), {})"
MANIFEST = {
    "command": ["opforge", "run"],
    "config": {"backend": "directory", "suite": "tiny", "device": "cuda", "p": 1.0, "ops": []},
    "versions": {"torch": "2.13.0"},
    "machine": {"device": "cuda", "platform": "Linux"},
    "plan": {
        "missing": ["gone.x"], "optional": [], "operators": 6, "cases": 7, "kernels": [], "losses": [], "remarks": [],
        "performance": ["old.x", "gpu.x", "small.x", "light.x", "wrong.x", "gone.x"],
    },
}  # fmt: skip
FIGURE = {"kernel_us": 10.0, "aten_us": 20.0, "rounds": 40, "calls": 8}


def row(op: str, verdict: str = "passed", **fields: object) -> dict:
    head = {
        "suite": "tiny",
        "op": op,
        "kernel": f"{op}_1",
        "case": CASE,
        "source": "",
        "id": op,
        "phase": "performance",
    }
    return {**head, "verdict": verdict, "reason": "", **fields}


def headline(speedup: float, **fields: object) -> dict:
    ends = {"speedup_low": speedup * 0.9, "speedup_high": speedup * 1.1}
    return {"kernel_us": 10.0, "aten_us": 10.0 * speedup, "speedup": speedup, **ends, "rounds": 40, **fields}


def figure(speedup: float, **fields: object) -> dict:
    return {**FIGURE, "speedup": speedup, "low": speedup * 0.9, "high": speedup * 1.1, **fields}


OLD = row("old.x", **headline(1.5), calls_per_round=16)
GPU = row(
    "gpu.x",
    **headline(2.0),
    timed="device",
    device=figure(2.0, method="events", cache="cold"),
    call=figure(0.8),
    sync=figure(0.7),
    sol={"bytes": 8388608, "flops": 1048576, "us": 5.0, "bound": "memory", "kernel": 62.4, "aten": 5.25, "counted": "formula"},
    clocks={"sm_mhz": 1200},
    notes=["the clock fell to 1200 MHz: throttled", "strides differ from ATen's"],
)  # fmt: skip
SMALL = row("small.x", **headline(1.2), launch_bound=True)
ALARM = row("light.x", **headline(90.0), alarm="140 % of the speed of light")
WRONG = row("wrong.x", "wrong", reason="result: all of it")
ROWS = [OLD, GPU, SMALL, ALARM, WRONG]


def read(about: dict, rows: list[dict]) -> tuple[Manifest, Summary]:
    manifest = Manifest.from_wire(about)
    return manifest, Summary.from_rows(manifest, map(ResultRow.from_wire, rows))


def on_terminal(rows: list[dict]) -> str:
    console = Console(file=io.StringIO(), width=140)
    terminal.print_run(console, *read(MANIFEST, rows))
    return console.file.getvalue()


def line_of(text: str, start: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return " ".join(line.split())


def test_the_table_says_what_there_is_of_each_operator():
    text = on_terminal(ROWS)
    assert line_of(text, "operator") == "operator kernel passed verdict × ATen call × ATen % SOL"
    assert line_of(text, "gpu.x ").endswith("passed 2.000 [1.800, 2.200] 0.80 [0.72, 0.88] 62 (5.2) events")
    assert line_of(text, "old.x ").endswith("passed 1.500 [1.350, 1.650]")
    assert line_of(text, "small.x ").endswith("passed 1.200 [1.080, 1.320] launch-bound")
    assert line_of(text, "light.x ").endswith("1/1 passed ALARM")
    assert line_of(text, "wrong.x  ").endswith("0/1 1 wrong")


def test_the_table_is_narrow():
    table = on_terminal(ROWS).partition("wrong.x (")[0]
    assert max(len(line) for line in table.splitlines()) <= 110


def test_columns_of_which_nothing_is_known_are_left_out():
    text = on_terminal([OLD])
    assert line_of(text, "operator") == "operator kernel passed verdict × ATen"
    for word in ("call times", "launch-bound", "ALARM", "machine"):
        assert word not in text


def test_scores_have_intervals():
    text = on_terminal(ROWS)
    assert line_of(text, "performance") == (
        "performance 1.732× ATen [1.608, 1.853], perf@1 0.40 [0.40, 0.40] of 5 operators"
    )
    assert line_of(text, "call times") == "call times 0.800× ATen [0.720, 0.880]"
    assert "1.200× ATen [1.080, 1.320] over 1 cases of 1 operators, scored separately" in line_of(text, "launch-bound")
    assert line_of(text, "timed ") == (
        "timed 4 of 5 performance cases: 1 launch-bound, 1 faster than SOL (not counted), 1 not timed"
    )


def test_an_alarm_is_loud_and_names_the_case():
    text = on_terminal(ROWS)
    assert f"ALARM light.x (light.x_1): 140 % of the speed of light\n  {CASE}\n" in text
    markdown = summary_markdown(*read(MANIFEST, ROWS))
    assert f"- **light.x (light.x_1)**: 140 % of the speed of light: `{CASE}`" in markdown
    assert markdown.index("ALARM") < markdown.index("## Failures by operator")


def test_what_is_said_of_clocks_is_said_once():
    text = on_terminal([GPU, {**GPU, "id": "2", "notes": ["the clock fell to 1100 MHz: throttled"]}])
    assert text.count("the clock fell") == 1
    assert "the clock fell to 1200 MHz: throttled (in 2 of 2 timed cases)" in text
    assert "strides differ" not in text


def test_the_summary_has_a_table_of_times():
    markdown = summary_markdown(*read(MANIFEST, ROWS))
    assert "| `gpu.x` | `gpu.x_1` | 1 | 2.000 [1.800, 2.200] | 0.80 [0.72, 0.88] | 62 (5.2) | events |" in markdown
    assert "| `small.x` | `small.x_1` | 1 | 1.200 [1.080, 1.320] |  |  | launch-bound |" in markdown
    assert "| perf@p | perf@0.8 0.40 [0.40, 0.40], perf@1 0.40" in markdown
    assert "## Machine state during timing" in markdown


def test_a_run_without_times_has_no_table_of_them():
    untimed = {**row("a.x"), "phase": "correctness"}
    manifest = {**MANIFEST, "plan": {**MANIFEST["plan"], "performance": []}}
    markdown = summary_markdown(*read(manifest, [untimed]))
    assert "## Times" not in markdown
    assert "| performance | nothing timed (no performance cases of right kernels) |" in markdown


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps(MANIFEST))
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    return tmp_path


def test_report_writes_the_files_anew(folder, capsys):
    assert call(["report", str(folder), "--format", "json"]) == 1
    scores = json.loads(capsys.readouterr().out)
    assert scores["performance_launch_bound"] == pytest.approx(1.2)
    assert scores["alarms"] == [{"op": "light.x", "kernel": "light.x_1", "case": CASE, "alarm": ALARM["alarm"]}]
    table = {r["op"]: r for r in csv.DictReader((folder / "operator_summary.csv").read_text().splitlines())}
    assert (table["gpu.x"]["speedup"], table["gpu.x"]["speedup_low"]) == ("2.0000", "1.8000")
    assert (table["gpu.x"]["call_speedup"], table["gpu.x"]["sol_percent"]) == ("0.8000", "62.4000")
    assert (table["small.x"]["speedup"], table["small.x"]["launch_bound_speedup"]) == ("", "1.2000")
    assert (table["light.x"]["speedup"], table["light.x"]["alarmed"]) == ("", "1")
    assert (table["old.x"]["sol_percent"], table["wrong.x"]["timed"], table["gone.x"]["timed"]) == ("", "0", "0")
    assert json.loads((folder / "full_results.json").read_text()) == ROWS


def raced(*rows: dict) -> str:
    console = Console(file=io.StringIO(), width=140)
    kernel_times.print_kernel_times(console, map(ResultRow.from_wire, rows))
    return " ".join(console.file.getvalue().split())


def test_a_race_on_a_gpu_has_all_figures():
    text = raced(GPU)
    assert "device kernel 10.0 µs ATen 20.0 µs × ATen 2.000 [1.800, 2.200] 40 rounds of 8 calls, by events" in text
    assert "cold cache" in text
    assert "call kernel 10.0 µs ATen 20.0 µs × ATen 0.800 [0.720, 0.880]" in text
    assert "sync kernel 10.0 µs ATen 20.0 µs × ATen 0.700" in text
    assert "SOL kernel 62 % ATen 5.2 % of 5.00 µs, memory-bound (8,388,608 bytes, 1,048,576 flops, by formula)" in text
    assert "note the clock fell to 1200 MHz: throttled" in text


def test_a_race_says_what_is_special():
    assert "launch-bound ATen's time is within the launch overhead" in raced(SMALL)
    assert "ALARM 140 % of the speed of light; not counted" in raced(ALARM)
    assert "wrong, so it was not timed: result: all of it" in raced(WRONG)
    assert "not timed" in raced(row("a.x"))
    assert "call kernel 10.0 µs ATen 15.0 µs × ATen 1.500 [1.350, 1.650] 40 rounds of 16 calls" in raced(OLD)
