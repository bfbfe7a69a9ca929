"""The page as one HTML file: style, script and data are inside, and it loads no other files."""

from __future__ import annotations

import base64
import functools
import hashlib
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from opforge.reports.page.case_data import strict_json

_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("dom", "packing", "theme", "charts", "highlight", "table", "detail", "overview", "list", "main")
"""In the order in which they appear in the page; all share one scope."""


def render_page(data: dict[str, Any], blobs: Iterable[tuple[str, list[str]]] | None = None) -> str:
    """Return a page; with ``blobs`` it is self-contained, otherwise it queries its server."""
    script, style = _script(), _asset("page.css")
    embedded = blobs is not None
    return string.Template(_asset("page.html")).substitute(
        policy=_policy(script, style, has_server=not embedded),
        style=style,
        data=_html_safe(strict_json({**data, "embedded": embedded})),
        script=script,
        blobs=_html_safe(_json_object(blobs or ())),
    )


def _json_object(blobs: Iterable[tuple[str, list[str]]]) -> str:
    return "{" + ",\n".join(f"{strict_json(name)}:{strict_json(chunks)}" for name, chunks in blobs) + "}"


def _html_safe(json_text: str) -> str:
    """Return equivalent JSON in which nothing can be read as HTML."""
    return json_text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _policy(script: str, style: str, *, has_server: bool) -> str:
    """Return the content security policy: our script, our style, and our server if there is one."""
    rules = {
        "default-src": "'none'",
        "script-src": f"'sha256-{_hash(script)}'",
        "style-src": f"'sha256-{_hash(style)}'",
        "connect-src": "'self'" if has_server else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@functools.cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


@functools.cache
def _script() -> str:
    parts = "\n".join(_asset(f"{name}.js") for name in _SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}\n}})();\n'
