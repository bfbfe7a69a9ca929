"""Untrusted words, such as a kernel's own, in the forms that other programs read."""

from __future__ import annotations

import re

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
"""What XML cannot hold, what a terminal might obey, and what shows text in another order than it is stored."""
_LINES = re.compile(r"\s*[\r\n\u2028\u2029\x85]+\s*")
_COMMAND = re.compile(r"^(\s*)(?=::)|(?<=##)(?=\[)", re.MULTILINE)
"""Where GitHub's runner would find a command in a line of output."""


def visible(text: str) -> str:
    """Return a text in which control characters stand as their numbers, and which is no command to GitHub's runner."""
    text = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
    return _COMMAND.sub(r"\1\\", text)


WHOLE = 4000
"""Characters of a text of which all is to be shown: a verdict has no more."""


def line(text: str) -> str:
    """Return a whole text on one line, with its indentation."""
    return text[: len(text) - len(text.lstrip(" "))] + one_line(text, WHOLE)


def one_line(text: str, most: int = 300) -> str:
    """Return a text on one line, cut where it is long."""
    text = visible(_LINES.sub(" ", text).strip())
    return text if len(text) <= most else text[: most - 1] + "…"


def code(text: str, most: int = 300) -> str:
    """Return a text as code in a Markdown table's cell: nothing in it is Markdown, HTML or a mention."""
    text = one_line(text, most).replace("|", "\\|")
    if not text:
        return ""
    fence = "`" * (max((len(run) for run in re.findall(r"`+", text)), default=0) + 1)
    return f"{fence} {text} {fence}" if text[0] == "`" or text[-1] == "`" else f"{fence}{text}{fence}"
