"""A run in the words of other programs: JUnit's XML and GitHub's workflow commands, whatever a kernel writes into its errors."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from opforge.reports import github, junit
from opforge.reports.escape import escape_controls, markdown_code, one_line
from opforge.runs.manifest import Manifest
from opforge.runs.rows import ResultRow
from opforge.runs.score import Summary
from tests.runs.written import manifest, timed, verdict

NASTY = "]]></failure>&amp;\x00\x01\x1b[31m\ufffe\"'<script>\r\n::error::x%0A##[command]"
ROWS = [
    timed("a.x", 2.0),
    verdict("b.x", "wrong", reason=NASTY, kernel="b\"<&'\x07"),
    verdict("b.x", "crashed", number=1, kernel="b\"<&'\x07"),
    verdict("c.x", "unsupported"),
    verdict("d.x", "error"),
]


def made(rows: list[dict], **plan) -> tuple[Manifest, Summary]:
    about = Manifest.from_wire(manifest(rows, **{"optional": ["c.x"], "missing": ["gone.x"], **plan}))
    return about, Summary.from_rows(about, map(ResultRow.from_wire, rows))


def test_every_verdict_is_a_test_and_what_is_missing_is_skipped():
    root = ET.fromstring("".join(junit.run_document(*made(ROWS), map(ResultRow.from_wire, ROWS))))
    suite = root.find("testsuite")
    found = [(case.get("classname"), [child.tag for child in case]) for case in suite]
    assert found == [
        ("a.x.a_1", []),
        ("b.x.b\"<&'\\x07", ["failure"]),
        ("b.x.b\"<&'\\x07", ["error"]),
        ("c.x.c_1", ["skipped"]),  # declined: an overload beyond the kernel's family
        ("d.x.d_1", ["error"]),
        ("gone.x", ["skipped"]),
    ]
    counts = {name: root.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "6", "failures": "1", "errors": "2", "skipped": "2"}
    assert suite.attrib == root.attrib


def test_nothing_in_a_kernels_words_breaks_the_xml():
    failure = ET.fromstring("".join(junit.run_document(*made(ROWS), map(ResultRow.from_wire, ROWS)))).find(".//failure")
    assert failure.get("type") == "wrong"
    assert "]]></failure>&amp;\\x00\\x01\\x1b[31m\\xfffe\"'<script>" in failure.text
    assert failure.get("message").startswith("]]></failure>&amp;\\x00\\x01")


@pytest.mark.parametrize("number", [*range(0x20), 0x7F, 0x9F, 0xD800, 0xDFFF, 0xFFFE, 0xFFFF, 0x1F600])
def test_any_character_is_well_formed(number):
    case = junit.TestCase("a", chr(number), "failure", "wrong", chr(number))
    text = "".join(junit.document("x", [case], {"tests": 1}))
    assert ET.fromstring(text.encode()).find(".//failure") is not None


def test_twenty_thousand_cases_are_well_formed_and_written_as_they_are_read():
    about, summary = made(ROWS[:2])
    read = count = ahead = 0

    def rows():
        nonlocal read
        for read in range(1, 20_001):  # noqa: B007  # how far it is, is what counts
            yield ResultRow.from_wire(ROWS[0])

    parser = ET.XMLPullParser(["end"])
    for piece in junit.run_document(about, summary, rows()):
        parser.feed(piece)
        for _, element in parser.read_events():
            count += element.tag == "testcase"
            element.clear()
        ahead = max(ahead, read - count)
    parser.close()
    assert count == 20_001  # and the operator without a kernel
    assert ahead <= 1000  # nothing is gathered; the parser itself is some lines behind


def test_annotations_are_one_line_each_and_escaped():
    about, summary = made(ROWS)
    lines = "".join(github.workflow_commands(about, summary, Path("/kernels"))).splitlines()
    assert all(line.startswith(("::error ", "::notice ", "::warning ")) for line in lines)
    (wrong,) = [line for line in lines if "title=b.x" in line]
    head, _, message = wrong.removeprefix("::error ").partition("::")
    assert head == "file=b\"<&'\\x07.py,title=b.x (b\"<&'\\x07) failed"
    assert message.startswith("0 of 2 cases passed%0A")
    assert "\\x0d%0A\\::error::x%250A##\\[command]" in message
    assert lines[-1].startswith("::notice title=directory on tiny::1 of 5 operators right")


def test_properties_cannot_be_left_by_their_text():
    assert github.workflow_command("error", "50%\r\n", title="a,b:c%") == "::error title=a%2Cb%3Ac%25::50%25\\x0d%0A\n"
    assert github.workflow_command("notice", "x") == "::notice::x\n"


def test_there_are_ten_errors_at_most_and_the_rest_is_said():
    rows = [verdict(f"op{n}.x", "wrong") for n in range(13)]
    lines = list(github.workflow_commands(*made(rows), Path("/")))
    assert sum(line.startswith("::error") for line in lines) == 10
    assert any("and 3 more operators failed" in line for line in lines)


def test_kernels_outside_of_the_repository_have_no_file():
    rows = [verdict("b.x", "wrong")]
    assert "file=" not in "".join(github.workflow_commands(*made(rows), Path("/elsewhere")))


def test_a_faster_than_light_case_is_a_warning():
    rows = [timed("a.x", 90.0, alarm="140 % of the speed of light")]
    (warning,) = [line for line in github.workflow_commands(*made(rows), Path("/")) if line.startswith("::warning")]
    assert "140 %25 of the speed of light%0A((T([0], f32),), {})" in warning


def test_the_step_summary_is_a_table_and_appended(tmp_path, monkeypatch):
    file = tmp_path / "summary.md"
    file.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(file))
    about, summary = made(ROWS)
    github.append_step_summary(github.step_summary(about, summary))
    text = file.read_text()
    assert text.startswith("before\n## opforge: `directory` on `tiny` (cpu)\n")
    assert "| `a.x` | `a_1` | ✅ 1/1 | 2.000 [1.980, 2.020] |  |" in text
    assert "❌ 0/2" in text
    assert "Without a kernel: `gone.x`" in text
    assert not any(line.startswith("::") for line in text.splitlines())


def test_without_github_no_summary_is_written(monkeypatch, tmp_path):
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.chdir(tmp_path)
    github.append_step_summary("nothing to see")
    assert not list(tmp_path.iterdir())


def test_a_long_summary_is_cut_where_github_would_refuse_it():
    rows = [verdict(f"op{n}.x", "wrong", reason="é" * 4000) for n in range(300)]
    text = github.step_summary(*made(rows))
    assert len(text.encode()) < 1 << 20
    assert "… and 100 more" in text


def test_untrusted_words():
    assert escape_controls("a\x1b\x85b\n") == "a\\x1b\\x85b\n"
    assert one_line("a\n  b\r\nc") == "a b c"
    assert one_line("x" * 400).endswith("x…")
    assert markdown_code("a|b") == "`a\\|b`"
    assert markdown_code("``a`") == "``` ``a` ```"
    assert markdown_code("") == ""
