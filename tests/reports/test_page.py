"""report.html in a real Chromium: sort, filter, open, switch, copy and run; text that is not ours stays text."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from opforge.cli.main import call
from tests.command import opforge
from tests.conftest import ROOT
from tests.reports.browsing import chromium, manifest, row, timed, write_run

EVIL = (
    "</script><script>window.owned = 1; alert(1)</script><img src=x onerror='window.owned = 2; alert(2)'>\"'`${owned}"
)
EVIL_NAME = "relu_implementation_<img src=x onerror=alert(1)>"
MANY = 300
WRONG_RELU = f"""
import torch
# {EVIL}
def relu_kernel_impl(self):
    raise ValueError({EVIL!r})
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def look(browser: Any) -> Callable[..., Any]:
    """Return a function that opens the page of a run from its file."""

    def opened(folder: Path) -> Any:
        assert call(["report", str(folder), "--format", "html"]) in (0, 1, 5)
        browser.get("about:blank")
        browser.get_log("browser")  # what is told of earlier pages
        browser.get((folder / "report.html").as_uri())
        return browser

    return opened


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of many operators: the tenth of them wrong, the speed rising with the number."""
    rows, kernels = [], {}
    for number in range(MANY):
        op, kernel = f"op{number:03}.default", f"op{number:03}_implementation_1"
        kernels[kernel] = [op]
        wrong = {"verdict": "wrong", "reason": f"result: error {number}.5"} if number % 10 == 0 else {}
        errors = {"kernel_error": 1e-3 if wrong else 1e-8, "aten_error": 1e-8, "bound": 1e-6}
        rows.append(row(op, kernel, 0, **wrong, **errors))
        rows.append(row(op, kernel, 1, **errors, **timed(0.5 + number / 100)))
    about = manifest(kernels, len(rows), ("gone.default",), finished="2026-01-01T00:01:00+00:00")
    about["peaks"] = {"device": "CPU", "bandwidth": [[65536, 1e11], [1 << 27, 2e10]], "rates": {"f32 product": 1.5e11}}
    return write_run(tmp_path_factory.mktemp("many") / "run", about, rows)


def find(browser: Any, selector: str) -> list[Any]:
    from selenium.webdriver.common.by import By

    return browser.find_elements(By.CSS_SELECTOR, selector)


def text(browser: Any, selector: str) -> str:
    return find(browser, selector)[0].text


def names(browser: Any) -> list[str]:
    """Return the operators in sight, in their order."""
    return [cell.text for cell in find(browser, "#rows .c-op")]


def wait(browser: Any, condition: Callable[[Any], Any]) -> Any:
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(browser, 30, poll_frequency=0.05).until(condition)


def press(browser: Any, *keys: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(browser).send_keys(*keys).perform()


def nothing_ran(browser: Any) -> None:
    """Hold that no foreign text became an element or a script, and that the page's policy had nothing to stop."""
    assert browser.execute_script("return window.owned === undefined")
    assert browser.execute_script("return window.violations") == []
    assert find(browser, "img, iframe, object, embed, form, [onerror], [onclick]") == []
    assert len(find(browser, "script")) == 3
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.mark.slow
def test_rows_are_sorted_and_only_those_in_sight_are_there(look, many):
    browser = look(many)
    assert names(browser)[:2] == ["op000.default", "op010.default"]  # what is not right comes first
    assert 10 < len(names(browser)) < 60
    find(browser, ".head .c-speedup button")[0].click()
    assert names(browser)[0] == f"op{MANY - 1}.default"
    assert text(browser, "#rows .c-speedup") == "3.490 [3.316, 3.664]"
    assert find(browser, ".head .c-speedup")[0].get_attribute("aria-sort") == "descending"
    find(browser, ".head .c-speedup button")[0].click()
    assert names(browser)[0] == "op001.default"  # the wrong ones have no speed, and come last
    browser.execute_script("scrollTo(0, document.body.scrollHeight)")
    wait(browser, lambda b: names(b)[-1] == "op290.default")
    assert "op001.default" not in names(browser)


@pytest.mark.slow
def test_search_and_filters(look, many):
    browser = look(many)
    assert text(browser, "#count").startswith(f"{MANY + 1} of {MANY + 1} operators")
    find(browser, "#search")[0].send_keys("OP12 passed")
    assert names(browser) == [f"op12{n}.default" for n in range(1, 10)]
    find(browser, "#search")[0].send_keys("\ue009a\ue000\ue017")  # Ctrl-A, Delete
    find(browser, "[data-verdict=wrong]")[0].click()
    assert text(browser, "#count").startswith("30 of 301")
    assert {badge.text for badge in find(browser, "#rows .badge")} == {"1 wrong"}
    find(browser, "[data-verdict='no kernel']")[0].click()
    assert names(browser) == ["gone.default"]
    find(browser, "[data-verdict=all]")[0].click()
    browser.execute_script(
        "const s = document.getElementById('speed'); s.value = 'significantly slower'; s.dispatchEvent(new Event('change'))"
    )
    assert text(browser, "#count").startswith("41 of 301")  # up to 0.95, whose interval ends below 1
    find(browser, ".group")[0].click()  # all wrong ones have one reason, numbers aside
    assert text(browser, "#count").startswith("30 of 301 operators with this reason")
    nothing_ran(browser)


def test_an_operator_with_its_charts_and_its_failing_case(look, many):
    browser = look(many)
    find(browser, "#rows .row")[1].click()
    wait(browser, lambda b: find(b, "dialog .case[open] .reason"))
    assert text(browser, "dialog h2") == "op010.default"
    assert text(browser, "dialog .case[open] .reason") == "result: error 10.5"
    assert "error 0.001 (ATen 1e-8), allowed 1e-6" in " ".join(text(browser, "dialog .case[open] dl").split())
    wait(
        browser, lambda b: len(find(b, "dialog svg path.dots")) == 3
    )  # one speed; one error within its bound, one beyond
    assert len(find(browser, "dialog svg path.bars")) == 1
    press(browser, "]")
    wait(browser, lambda b: text(b, "dialog h2") == "op020.default")
    press(browser, "\ue00c")  # Escape
    wait(browser, lambda b: not find(b, "dialog[open]"))
    for name, points in (("errors", 2), ("roofline", 1)):
        find(browser, f"#{name} summary")[0].click()
        wait(browser, lambda b, name=name, points=points: len(find(b, f"#{name} path.dots")) == points)
    assert len(find(browser, "#roofline .guide")) == 3


def test_the_keyboard_does_it_all(look, many):
    browser = look(many)
    press(browser, "j", "\ue015", "k")  # down, down, up
    assert [cell.text for cell in find(browser, "#chosen .c-op")] == ["op000.default"]
    press(browser, "\ue007")  # Enter
    wait(browser, lambda b: find(b, "dialog[open]"))
    press(browser, "\ue00c")
    wait(browser, lambda b: not find(b, "dialog[open]"))
    press(browser, "/")
    press(browser, "op299")
    assert names(browser) == ["op299.default"]


def test_light_and_dark(look, many):
    browser = look(many)
    background = "return getComputedStyle(document.body).backgroundColor"
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        before = browser.execute_script(background)
        dark = browser.execute_script("return matchMedia('(prefers-color-scheme: dark)').matches")
        assert dark == (scheme == "dark")
        find(browser, "#theme")[0].click()
        assert browser.execute_script(background) != before
        press(browser, "t")
        assert browser.execute_script(background) == before
        browser.execute_script("localStorage.clear(); delete document.documentElement.dataset.theme")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_phone_shows_everything_without_scrolling_sideways(look, many):
    size = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    browser = look(many)
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        browser.refresh()
        wide = "return document.documentElement.scrollWidth"
        assert browser.execute_script(wide) <= 360
        assert {c.text for c in find(browser, "#rows .badge")} == {"1 wrong"}
        find(browser, "#rows .row")[0].click()
        wait(browser, lambda b: find(b, "dialog .case[open] .reason"))
        assert (
            browser.execute_script("const d = document.getElementById('detail'); return d.scrollWidth - d.clientWidth")
            <= 0
        )
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.fixture(scope="module")
def evil_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a real run of a kernel whose name, source and error text are HTML and script."""
    folder = tmp_path_factory.mktemp("evil")
    (folder / "kernels" / "relu").mkdir(parents=True)
    (folder / "kernels" / "relu" / f"{EVIL_NAME}.py").write_text(WRONG_RELU)
    words = ("run", "--backend", "directory", "--ops-directory", "kernels", "--out", "a run")
    assert opforge(*words, cwd=folder).returncode == 1
    return folder / "a run"


def test_a_kernel_of_html_and_script_shows_as_text_and_the_copied_command_reproduces_it(browser, evil_run):
    browser.get((evil_run / "report.html").as_uri())
    find(browser, "#rows .row")[0].click()
    wait(browser, lambda b: find(b, "dialog .source"))
    assert EVIL in text(browser, "dialog .case[open] .reason")
    assert f"# {EVIL}" in text(browser, "dialog .source")
    assert EVIL_NAME in text(browser, "dialog dl")
    assert [span.text for span in find(browser, "dialog .t-keyword")] == ["import", "def", "self", "raise"]
    nothing_ran(browser)

    find(browser, "dialog .case[open] .copy")[0].click()
    wait(browser, lambda b: text(b, "dialog .case[open] .copy") == "copied")
    press(browser, "\ue00c")
    wait(browser, lambda b: not find(b, "dialog[open]"))
    find(browser, "#search")[0].send_keys("\ue009v\ue000")  # Ctrl-V
    copied = find(browser, "#search")[0].get_property("value")
    assert shlex.split(copied)[:3] == ["opforge", "reproduce", str(evil_run.resolve())]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    surroundings = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(copied, shell=True, capture_output=True, text=True, env=surroundings, check=False)
    assert done.returncode == 1, done.stderr
    before, now = (line.split(None, 2 if "run " in line[:11] else 1)[-1] for line in done.stdout.splitlines()[2:4])
    assert "ValueError: </script><script>" in before
    assert before.removeprefix("run ").strip() == now.strip()


def test_every_text_of_a_run_stays_text(look, tmp_path):
    source = tmp_path / "k.py"
    source.write_text(EVIL)
    about = manifest({EVIL: [EVIL]}, 2, (f"gone {EVIL}",), finished=EVIL)
    about |= {"command": [EVIL], "versions": {EVIL: EVIL, "torch": EVIL}, "machine": {"device": EVIL, "platform": EVIL}}
    about["config"] |= {"backend": EVIL, "suite": EVIL, "device": EVIL}
    about["plan"] |= {"losses": [EVIL], "remarks": [EVIL], "weak": {"ops": {EVIL: [EVIL]}}}
    about["plan"]["kernels"][0] |= {"hints": [EVIL], "file": str(source), "digest": "other"}
    fields = {
        "case": EVIL,
        "source": EVIL,
        "reason": EVIL,
        "notes": [EVIL, f"clock {EVIL}"],
        "variants": [EVIL],
        "calls": {EVIL: 1},
    }
    rows = [
        row(EVIL, EVIL, 0, "wrong", **fields | {"id": EVIL}),
        row(EVIL, EVIL, 1, **fields | timed(2.0, alarm=EVIL)),
    ]
    browser = look(write_run(tmp_path / "run", about, rows))
    assert text(browser, "h1").startswith(f"{EVIL} on ")
    browser.execute_script("for (const part of document.querySelectorAll('details')) part.open = true")
    find(browser, "#rows .row")[0].click()
    wait(browser, lambda b: "was changed or removed after the run" in text(b, "dialog"))
    browser.execute_script("for (const part of document.querySelectorAll('dialog details')) part.open = true")
    wait(browser, lambda b: len(find(b, "dialog .reason")) == 3)
    nothing_ran(browser)


def test_the_policy_would_stop_what_slipped_through(look, many):
    from selenium.common.exceptions import JavascriptException

    browser = look(many)
    for script, kind in (
        ("document.body.innerHTML = arguments[0]", "TrustedHTML"),
        ("document.createElement('script').text = arguments[0]", "TrustedScript"),
        ("document.body.setAttribute('onclick', arguments[0])", "TrustedScript"),
    ):
        with pytest.raises(JavascriptException, match=kind):
            browser.execute_script(script, EVIL)
    wait(browser, lambda b: b.execute_script("return window.violations.length") == 3)


def test_numbers_that_json_does_not_have(look, tmp_path):
    errors = [float("inf"), float("nan"), 0.0]
    rows = [row("a.default", "a", n, "wrong", kernel_error=e, aten_error=0.0, bound=1e-6) for n, e in enumerate(errors)]
    browser = look(write_run(tmp_path / "run", manifest({"a": ["a.default"]}, 3), rows))
    find(browser, "#rows .row")[0].click()
    wait(browser, lambda b: len(find(b, "dialog .case")) == 3)
    browser.execute_script("for (const part of document.querySelectorAll('dialog details')) part.open = true")
    shown = wait(
        browser,
        lambda b: (
            [e.text for e in find(b, "dialog .case dd:first-of-type")] if len(find(b, "dialog .case dl")) == 3 else None
        ),
    )
    assert [line.split(" (")[0] for line in shown] == ["∞", "NaN", "0"]
    nothing_ran(browser)


def test_the_page_of_an_interrupted_run(look, tmp_path):
    about = manifest({"a": ["a.default"], "b": ["b.default"]}, 5)
    folder = write_run(tmp_path / "run", about, [row("a.default", "a", n) for n in range(2)])
    with (folder / "results.jsonl").open("a") as handle:
        handle.write('{"op": "b.def')  # a line that was being written
    browser = look(folder)
    assert text(browser, "#state").startswith("interrupted: 2 of 5 cases judged")
    assert f"opforge run --resume {folder}" in text(browser, "#state")
    assert names(browser) == ["b.default", "a.default"]
    assert [badge.text for badge in find(browser, "#rows .badge")] == ["not judged", "passed"]


def test_the_page_of_a_run_without_a_verdict(look, tmp_path):
    browser = look(write_run(tmp_path / "run", manifest({"a": ["a.default"]}, 5), []))
    assert text(browser, "#state").startswith("interrupted: 0 of 5 cases judged")
    assert "No case has been judged." in text(browser, "#overview")
    find(browser, "#rows .row")[0].click()
    wait(browser, lambda b: "None of its cases has been judged." in text(b, "dialog"))
    press(browser, "\ue00c")
    find(browser, "#errors summary")[0].click()
    wait(browser, lambda b: "No case has an error" in text(b, "#errors"))
    nothing_ran(browser)


def test_the_page_of_a_run_with_only_crashes(look, tmp_path):
    reason = "the kernel's process was killed by SIGSEGV"
    rows = [row(f"{op}.default", op, n, "crashed", reason=reason) for op in "abc" for n in range(2)]
    about = manifest({op: [f"{op}.default"] for op in "abc"}, 6, finished="2026-01-01T00:01:00+00:00")
    browser = look(write_run(tmp_path / "run", about, rows))
    assert text(browser, "#state") == "finished: 6 cases judged"
    assert text(browser, ".card .value") == "0.0000"
    assert text(browser, ".legend") == "cases: 6 crashed"
    assert text(browser, ".group") == f"6 crashed\n{reason}\n3 operators"
    assert {badge.text for badge in find(browser, "#rows .badge")} == {"2 crashed"}


def test_cases_of_one_operator_come_some_at_a_time(look, tmp_path):
    rows = [row("a.default", "a", n, case=f"(({n},), {{}})") for n in range(400)]
    browser = look(write_run(tmp_path / "run", manifest({"a": ["a.default"]}, 400, finished="now"), rows))
    find(browser, "#rows .row")[0].click()
    wait(browser, lambda b: len(find(b, "dialog .case")) == 50)
    find(browser, "dialog section > button")[0].click()
    assert len(find(browser, "dialog .case")) == 100
    assert find(browser, "dialog .case code")[-1].get_property("textContent") == "((99,), {})"
