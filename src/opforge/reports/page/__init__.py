"""A run as an HTML page: report.html, and the pages that `opforge view` serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opforge.cache import write_atomically
from opforge.reports.page.columns import Columns
from opforge.reports.page.content import content, state_of
from opforge.reports.page.html import page
from opforge.reports.page.sources import Sources
from opforge.runs.score import Summary
from opforge.runs.store import is_held, read_rows

__all__ = ["PAGE", "write_page"]

PAGE = "report.html"


def write_page(path: Path, manifest: dict[str, Any], summary: Summary) -> None:
    """Write the page of a run into its folder; rows are read one at a time and kept compressed."""
    columns, sources = Columns(), Sources(manifest, summary)
    for row in read_rows(path):
        columns.add(row, summary)
    data = content(path, manifest, summary, columns, state_of(manifest, summary, held=is_held(path)))
    makers = (columns, columns.names()), (sources, sources.names())
    blobs = ((name, maker.blob(name) or []) for maker, names in makers for name in names)
    write_atomically(path / PAGE, page(data, blobs))
