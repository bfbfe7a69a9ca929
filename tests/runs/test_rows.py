"""Rows and manifests: what is written is read, and written again as it was."""

from __future__ import annotations

import json

import pytest

from opforge.errors import RunDirectoryError
from opforge.runs.manifest import Manifest
from opforge.runs.rows import ResultRow
from opforge.runs.store import read_manifest, read_rows
from tests.runs.written import manifest, timed, verdict, write

SOL = {"bytes": 8, "flops": 2, "us": 1.0, "bound": "memory", "kernel": 50.0, "aten": 25.0, "counted": "formula"}
TIMES = {"kernel_us": 5.0, "aten_us": 10.0, "speedup": 2.0, "low": 1.9, "high": 2.1, "rounds": 40, "set_aside": 1}


@pytest.mark.parametrize(
    "line",
    [
        verdict("a.x"),
        verdict("a.x", "wrong", notes=["strides differ"], calls={"add": 1}, kernel_error=1.0, bound=0.5),
        verdict("a.x", kernel_error=1.0, bound=2.0, calls={"add": 1}, variants=["nan"], a_field_of_tomorrow={"x": 1}),
        timed("a.x", 2.0, call=TIMES, sol=SOL, launch_bound=True, clocks={"load": 0.5}),
    ],
)
def test_a_row_is_written_as_it_was_read(line):
    assert json.dumps(ResultRow.from_wire(line).wire()) == json.dumps(line)


def test_a_row_has_what_was_measured():
    row = ResultRow.from_wire(timed("a.x", 2.0, call=TIMES, sol=SOL, rtol=0.1))
    assert (row.headline.speedup, row.headline.aten_us, row.headline.rounds) == (2.0, 10.0, 40)
    assert (row.times("call").low, row.times("device")) == (1.9, None)
    assert (row.sol.bytes, row.sol.kernel) == (8, 50.0)
    assert (row.tolerated, row.raised, row.launch_bound, row.alarm) == (True, False, False, "")


def test_names_of_the_first_version_are_read():
    row = ResultRow.from_wire(verdict("a.x", light=SOL, forms=["nan"]))
    assert (row.sol.flops, row.variants) == (2, ["nan"])
    assert row.wire().keys() == verdict("a.x", sol=SOL, variants=["nan"]).keys()


@pytest.mark.parametrize("line", ['{"op": "a.x", "kernel": "k"}', "[1]", "1", "null"])
def test_a_line_that_is_no_verdict_is_named(tmp_path, line):
    folder = write(tmp_path / "run", [verdict("a.x")])
    with (folder / "results.jsonl").open("a") as handle:
        handle.write(line + "\n")
    with pytest.raises(RunDirectoryError, match="line 2 is broken"):
        list(read_rows(folder))


def test_a_manifest_is_written_as_it_was_read():
    about = manifest([timed("a.x", 2.0)], weak={"origin": "here", "ops": {"a.x": ["zeros"]}})
    del about["finished"]
    about["plan"]["kernels"][0] |= {"digest": about["plan"]["kernels"][0].pop("digest")}
    ends = {"confinement": {"missing": []}, "peaks": None, "finished": "now", "scores": {"correctness": 1.0}}
    about |= ends | {"proofs": {"written": ["p"], "remarks": {}}, "a_field_of_tomorrow": 1}
    assert json.loads(json.dumps(Manifest.from_wire(about).wire())) == about


def test_a_manifest_without_a_plan_is_broken(tmp_path):
    (tmp_path / "manifest.json").write_text('{"config": {}}')
    with pytest.raises(RunDirectoryError, match=r"manifest\.json is broken: it has no 'plan'"):
        read_manifest(tmp_path)
