"""A run as an HTML page: report.html, and the pages that `opforge view` serves."""

from __future__ import annotations

from pathlib import Path

from opforge.cache import write_atomically
from opforge.reports.page.case_data import CaseData
from opforge.reports.page.content import run_page_data, run_state
from opforge.reports.page.kernel_sources import Sources
from opforge.reports.page.render import render_page
from opforge.runs.manifest import Manifest
from opforge.runs.score import Summary
from opforge.runs.store import is_locked, read_rows

__all__ = ["PAGE_FILE", "write_page"]

PAGE_FILE = "report.html"


def write_page(path: Path, manifest: Manifest, summary: Summary) -> None:
    """Write the page of a run into its folder; rows are read one at a time and kept compressed."""
    columns, sources = CaseData(), Sources(manifest, summary)
    for row in read_rows(path):
        columns.add(row, summary)
    data = run_page_data(path, manifest, summary, columns, run_state(manifest, summary, is_locked=is_locked(path)))
    makers = (columns, columns.names()), (sources, sources.names())
    blobs = ((name, maker.blob(name) or []) for maker, names in makers for name in names)
    write_atomically(path / PAGE_FILE, render_page(data, blobs))
