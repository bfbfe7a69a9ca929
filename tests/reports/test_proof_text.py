"""What is proven of a kernel, in its page: taken from the proof beside it, only of the source that was judged, and as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from opforge.cli.main import call
from opforge.kernels.custom_folder import digest
from opforge.kernels.proof import Proof, proof_path, read_proof
from opforge.reports.page.proof_text import ProofText
from opforge.runs.manifest import Manifest
from opforge.runs.rows import ResultRow
from opforge.runs.score import Summary
from opforge.runtime.proof_files import PROOF_FORMAT
from tests.command import opforge
from tests.install.proving import write
from tests.reports.browsing import chromium, manifest, row, write_run
from tests.reports.test_page import EVIL, find, nothing_ran, text, wait

RELU = """
import torch
def relu_kernel_impl(self):
    return torch.where(self > 0, self, torch.where(self.isnan(), self, 0)).to(self.dtype)
"""
WHERE = {"torch": "2.13.0", "device": "a CPU"}
ROW = {"rank": [0, 2], "numel": [0, 1000], "extents": [[[0, 50], [1, 9]]], "layouts": ["contiguous", "channels_last"]}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


def cells(browser: Any) -> list[list[str]]:
    """Return the rows of the table of what is proven."""
    return [[cell.text for cell in find(line, "td")] for line in find(browser, "dialog .proof tbody tr")]


def open_first(browser: Any, folder: Path) -> None:
    browser.get("about:blank")
    browser.get_log("browser")  # what is told of earlier pages
    browser.get((folder / "report.html").as_uri())
    find(browser, "#rows .row")[0].click()
    wait(browser, lambda b: find(b, "dialog section[aria-label=proof]"))


@pytest.mark.slow
def test_the_page_that_a_run_leaves_shows_what_the_run_has_proven(browser, tmp_path):
    file = tmp_path / "kernels" / "relu" / "relu_implementation_1.py"
    file.parent.mkdir(parents=True)
    file.write_text(RELU)
    done = opforge(
        "run",
        "--backend",
        "directory",
        "--ops-directory",
        "kernels",
        "--out",
        "run",
        "--race-seconds",
        "1",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    open_first(browser, tmp_path / "run")
    proof = read_proof(file, digest(file))
    assert isinstance(proof, Proof)
    ((op, dtypes, dimensions, elements, _extents, layouts, arguments, speed),) = cells(browser)
    assert arguments == "", "relu has none"
    assert (op, dtypes, dimensions, elements) == ("relu.default", "float32", "0 to 2", "0 to 1048576")
    assert layouts.split(", ")[0] == "contiguous"
    (good,) = (good for _, _, good in proof.operators["relu.default"]["float32"].timed)
    assert speed == ("" if good else "none: slower at ") + "524288 to 1048576"
    assert find(browser, "dialog [aria-label=proof] .remark") == []
    assert f"smoke\ndevice\n{proof.device}" in text(browser, "dialog [aria-label=proof]")
    nothing_ran(browser)


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., tuple[Path, dict[str, Any]]]:
    """Return a function that writes a kernel with a proof, and returns its file and the manifest of a run that judged it."""

    def make(operators: dict[str, Any], ops: tuple[str, ...] = ("a.default", "a.out"), /, **changes: Any) -> Any:
        file = tmp_path / "a.py"
        file.write_text(RELU)
        proof = {
            "opforge_proof": PROOF_FORMAT,
            "digest": digest(file),
            **WHERE,
            "suites": ["tiny"],
            "operators": operators,
        }
        write(proof_path(file), {**proof, **changes})
        about = manifest({"a": list(ops)}, 3, finished="now", proofs={"written": [str(proof_path(file))]})
        about["machine"]["name"] = WHERE["device"]
        about["plan"]["kernels"][0] |= {"file": str(file), "digest": digest(file)}
        return file, about

    return make


def shown(about: dict[str, Any], *rows: dict[str, Any]) -> dict[str, Any]:
    manifest = Manifest.from_wire(about)
    kernel = manifest.plan.kernels[0]
    return ProofText(manifest, Summary.from_rows(manifest, map(ResultRow.from_wire, rows))).describe(
        kernel, Path(kernel.file)
    )


def test_sizes_in_words(made):
    ranges = [[5, 90, True], [91, 600, False], [601, 4000, True]]
    slower = [[500, 2000, False]]
    arguments = {
        "dim": {"int": [-1, 2], "default": []},
        "mode": {"'mean'": [], "None": []},
        "eps": {"float": [0.5, 0.5]},
    }
    rows = {
        "float32": ROW,
        "float32,int64": {**ROW, "timed": ranges, "arguments": arguments},
        "[float32]": {**ROW, "timed": slower},
    }
    _, about = made({"a.default": rows})
    found = shown(about, row("a.default", "a"))
    assert found["remark"] == ""
    assert [r["speed"] for r in found["rows"]] == [
        "not timed",
        "5 to 90; 601 to 1000",
        "none: slower at 500 to 1000",
    ]
    assert found["rows"][1] | {"speed": ""} == {
        "op": "a.default", "dtypes": "float32, int64", "dimensions": "0 to 2", "elements": "0 to 1000", "extents": "[1 to 9 × 0 to 50]",
        "layouts": "contiguous, channels last", "speed": "",
        "arguments": "dim: int -1 to 2, left out; mode: 'mean', None; eps: float 0.5",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("verdicts", "reason"),
    [
        ([], "not judged"),
        (["wrong", "unsupported"], "no case passed"),
        (["passed", "wrong"], "all dtypes have failed cases, or none that passed"),
        (["passed", "unsupported"], "ATen raises on its cases, or they have no tensor"),
    ],
)
def test_why_an_operator_is_not_in_the_proof(made, verdicts, reason):
    _, about = made({"a.default": {"float32": ROW}})
    assert shown(about, *(row("a.out", "a", n, v) for n, v in enumerate(verdicts)))["without"] == {"a.out": reason}


@pytest.mark.parametrize(
    ("changes", "remark"),
    [
        ({"digest": "0123456789abcdef"}, "is the proof of another version of the source"),
        ({"torch": "2.12.0"}, "The proof beside it is for another environment: a CPU, torch 2.12.0."),
        ({"device": "a GPU"}, "The proof beside it is for another environment: a GPU, torch 2.13.0."),
        ({"operators": ["float32"]}, "is broken"),
        ({"operators": {"a.default": {"float32": {"rank": [1]}}}}, "is broken"),
        ({"device": "\x1b[2J"}, "is broken"),
        ({"opforge_proof": 1}, "is of another format (1); judge it again"),
    ],
)
def test_a_proof_of_something_else_is_not_shown(made, changes, remark):
    _, about = made({"a.default": {"float32": ROW}}, **changes)
    found = shown(about, row("a.default", "a"))
    assert set(found) == {"remark"}
    assert remark in found["remark"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_a_broken_proof_is_told(made, content):
    file, about = made({})
    proof_path(file).write_bytes(content)
    assert "is broken; judge the kernel again" in shown(about)["remark"]


def test_failures_are_told(made):
    failed = {"a.out": {"float32": {"cases": {"0123": "wrong"}, "more": {"wrong": 2}}}}
    _, about = made({"a.default": {"float32": ROW}}, failed=failed)
    assert shown(about, row("a.out", "a"))["without"] == {"a.out": "3 cases failed, for example 0123: wrong"}
    _, about = made({}, failed=failed)
    assert shown(about) == {"remark": "Nothing: 3 cases failed, for example 0123: wrong."}
    _, about = made({}, failed={"a.out": {"float32": ["0123"]}})
    assert "is broken" in shown(about)["remark"]


def test_why_there_is_none(made):
    file, about = made({"a.default": {"float32": ROW}})
    for verdict in ("cheated", "crashed", "timed_out"):
        assert shown(about, row("a.out", "a", 0, verdict)) == {
            "remark": "Nothing: it cheated, crashed or hung in this run."
        }
    assert shown({**about, "proofs": {"written": []}})["remark"] == "By another run of the same source."
    proof_path(file).unlink()
    assert "This run's proof is no longer there" in shown(about)["remark"]
    assert "all dtypes have failed cases" in shown({**about, "proofs": {"written": []}})["remark"]
    failed = {"written": [], "failed": "/k/a.proof.json: Permission denied"}
    assert shown({**about, "proofs": failed})["remark"].endswith(
        "could not write its proofs: /k/a.proof.json: Permission denied"
    )
    remarks = {"a": "/k/a.proof.json cannot be written: Is a directory", "b": "another"}
    assert shown({**about, "proofs": {"written": [], "remarks": remarks}})["remark"].endswith(remarks["a"])
    del about["proofs"]
    assert "they are written at its end" in shown(about)["remark"]
    about["plan"]["kernels"][0]["reference"] = "mine"
    assert "judged against a reference" in shown(about)["remark"]


def test_a_proof_of_html_and_script_shows_as_text(browser, made, tmp_path):
    rows = {EVIL: {**ROW, "layouts": [EVIL], "arguments": {EVIL: {EVIL: []}}}}
    places = {"a.default": {"float32": ROW}, EVIL: rows}
    _, about = made(places, ("a.default", f"gone {EVIL}"), suites=[EVIL], device=EVIL, torch=EVIL)
    about["machine"]["name"] = about["versions"]["torch"] = EVIL
    folder = write_run(tmp_path / "run", about, [row("a.default", "a", n) for n in range(3)])
    assert call(["report", str(folder), "--format", "html"]) in (0, 1)
    browser.get("about:blank")
    browser.get((folder / "report.html").as_uri())
    find(browser, "#search")[0].send_keys("passed")
    find(browser, "#rows .row")[0].click()
    wait(browser, lambda b: find(b, "dialog .proof"))
    assert [line[0] for line in cells(browser)] == ["a.default", EVIL]  # that which is open comes first
    assert cells(browser)[1][5] == EVIL.replace("_", " ")
    assert cells(browser)[1][6] == f"{EVIL}: {EVIL}"
    assert f"gone {EVIL}\nnot judged" in text(browser, "dialog [aria-label=proof]")
    nothing_ran(browser)


def test_a_proof_on_a_phone_needs_no_scrolling_of_the_page(browser, made, tmp_path):
    rows = {",".join(["float32"] * 6): {**ROW, "timed": [[1, 10**9, True]]}}
    _, about = made({"a.default": rows}, ("a.default",))
    folder = write_run(tmp_path / "run", about, [row("a.default", "a", n) for n in range(3)])
    assert call(["report", str(folder), "--format", "html"]) == 0
    size = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        open_first(browser, folder)
        beyond = "const d = document.getElementById('detail'); return d.scrollWidth - d.clientWidth"
        assert len(cells(browser)) == 1
        assert browser.execute_script(beyond) <= 0
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
