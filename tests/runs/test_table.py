"""Results as Arrow tables and Parquet files with fixed types, and SQL over them."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from opforge.cli.main import call
from opforge.errors import OpforgeError
from opforge.runs import table
from opforge.runs.query import query
from tests.conftest import ROOT
from tests.runs.written import timed, verdict, write

FIGURE = {
    "kernel_us": 1.0,
    "aten_us": 2,
    "speedup": 2.0,
    "low": 1.9,
    "high": 2.1,
    "rounds": 8,
    "set_aside": 0,
    "calls": 4,
}
FULL = timed(
    "a.x",
    2.0,
    notes=["strides differ"],
    calls={"aten::mul": 2},
    device={**FIGURE, "method": "graph", "cache": "cold"},
    call=FIGURE,
    sol={"bytes": 8, "flops": 4, "us": 0.5, "bound": "memory", "kernel": 50, "aten": 25.0, "counted": "formula"},
    launch_bound=True,
    clocks={"sm_mhz_low": 1200},
    kernel_error=0,  # a whole number where a real one is meant
    a_field_of_tomorrow={"x": 1},
)


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    rows = [FULL, verdict("b.x", "wrong", reason="'; DROP TABLE results; --")]
    return [
        write(tmp_path / "one", rows, missing=["gone.x"]),
        write(tmp_path / "two", [timed("a.x", 1.0)], unfinished=True),
    ]


def test_every_line_has_all_columns_with_their_types(two):
    found = table.results(two).read_all()
    assert found.schema.equals(table.RESULTS)
    first, second, third = found.to_pylist()
    assert (first["run"], third["run"]) == ("one", "two")
    assert first["digest"] == "same"
    assert first["calls"] == [("aten::mul", 2)]
    assert first["device_time"]["method"] == "graph"
    assert first["call_time"]["aten_us"] == 2.0
    assert first["call_time"]["method"] is None
    assert first["sol"]["kernel"] == 50.0
    assert first["launch_bound"] is True
    assert json.loads(first["clocks"]) == {"sm_mhz_low": 1200}
    assert first["kernel_error"] == 0.0
    assert (second["speedup"], second["launch_bound"], second["notes"]) == (None, False, [])


def test_a_run_is_a_row_finished_or_not(two):
    found = table.runs(two)
    assert found.schema.equals(table.RUNS)
    one, other = found.to_pylist()
    assert (one["run"], one["operators"], one["right"], one["missing"]) == ("one", 3, 1, 1)
    assert one["correctness"] == pytest.approx(1 / 3)
    assert one["finished"].isoformat() == "2026-01-01T00:01:00+00:00"
    assert other["finished"] is None
    assert other["performance_low"] == pytest.approx(0.99)


def test_parquet_holds_the_same_and_is_read_by_duckdb(two, tmp_path, capsys):
    duckdb = pytest.importorskip("duckdb")
    assert call(["query", *map(str, two), "--parquet", str(tmp_path / "made")]) == 0
    files = capsys.readouterr().out.split()
    assert [Path(f).name for f in files] == ["results.parquet", "runs.parquet"]
    assert pq.read_table(files[0]).equals(table.results(two).read_all())
    rows = duckdb.sql(f"SELECT op, sol.kernel, calls['aten::mul'] FROM '{files[0]}' WHERE launch_bound").fetchall()
    assert rows == [("a.x", 50.0, 2)]


def test_fields_of_version_0_1_are_read_and_asked_by_their_old_names(tmp_path):
    pytest.importorskip("duckdb")
    old = {name: value for name, value in FULL.items() if name != "sol"} | {"light": FULL["sol"], "forms": ["nan"]}
    path = write(tmp_path / "old", [old])
    (row,) = table.results([path]).read_all().to_pylist()
    assert (row["sol"]["kernel"], row["variants"]) == (50.0, ["nan"])
    for sql in ("SELECT sol.kernel, variants FROM results", "SELECT light.kernel, forms FROM results"):
        assert query([path], sql)[1] == [(50.0, ["nan"])]


def test_many_lines_come_in_batches(tmp_path):
    rows = [verdict("a.x", number=n) for n in range(20_000)]
    path = write(tmp_path / "many", rows)
    sizes = [batch.num_rows for batch in table.results([path])]
    assert sum(sizes) == 20_000
    assert max(sizes) < 10_000


def test_a_query_may_ask_a_table_twice(two):
    sql = "SELECT a.op FROM results a JOIN results b USING (op) JOIN runs ON a.run = runs.run WHERE b.run = 'two' ORDER BY 1"
    assert query(two, sql) == (["op"], [("a.x",), ("a.x",)])


def test_a_bad_query_is_a_usage_error(two, capsys):
    assert call(["query", *map(str, two), "--sql", "SELECT nonsense FROM results"]) == 2
    assert "nonsense" in capsys.readouterr().err
    assert call(["query", *map(str, two)]) == 2
    assert "--sql QUERY or --parquet FOLDER" in capsys.readouterr().err


def test_a_missing_duckdb_is_named_with_the_command_that_installs_it(two, monkeypatch):
    usual = builtins.__import__

    def without(name, *rest, **more):
        if name == "duckdb":
            raise ImportError(name)
        return usual(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(OpforgeError, match=r"pip install 'opforge\[duckdb\]'"):
        query(two, "SELECT 1")


@pytest.mark.parametrize(
    ("format_", "said"),
    [
        ("json", '{"op": "a.x", "n": 2, "best": 2.0}\n{"op": "b.x", "n": 1, "best": null}\n'),
        ("csv", "op,n,best\na.x,2,2.0\nb.x,1,\n"),
        ("text", "op   n  best\na.x  2  2\nb.x  1\n"),
    ],
)
def test_answers_come_in_all_forms(two, format_, said, capsys):
    sql = "SELECT op, count(*) AS n, max(speedup) AS best FROM results GROUP BY op ORDER BY op"
    assert call(["query", *map(str, two), "--sql", sql, "--format", format_]) == 0
    assert "".join(f"{line.rstrip()}\n" for line in capsys.readouterr().out.splitlines()) == said


def test_the_page_describes_every_column():
    page = (ROOT / "docs" / "queries.md").read_text()
    for name in {*table.RESULTS.names, *table.RUNS.names}:
        assert f"`{name}`" in page, name
