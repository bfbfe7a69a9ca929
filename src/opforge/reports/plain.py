"""Untrusted words, such as a kernel's own, in the forms that other programs read."""

from __future__ import annotations

import re

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""What XML cannot hold, and what a terminal might obey."""
_LINES = re.compile(r"\s*[\r\n]+\s*")


def visible(text: str) -> str:
    """Return a text in which control characters stand as their numbers."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def one_line(text: str, most: int = 300) -> str:
    """Return a text on one line, cut where it is long."""
    text = _LINES.sub(" ", visible(text)).strip()
    return text if len(text) <= most else text[: most - 1] + "…"


def code(text: str, most: int = 300) -> str:
    """Return a text as code in a Markdown table's cell: nothing in it is Markdown, HTML or a mention."""
    text = one_line(text, most).replace("|", "\\|")
    if not text:
        return ""
    fence = "`" * (max((len(run) for run in re.findall(r"`+", text)), default=0) + 1)
    return f"{fence} {text} {fence}" if text[0] == "`" or text[-1] == "`" else f"{fence}{text}{fence}"
