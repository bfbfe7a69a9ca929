"""Escape untrusted text, such as a kernel's output, for other programs."""

from __future__ import annotations

import re

_CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
"""Characters unsafe in XML or in a terminal, and those that reorder text."""
_LINE_BREAKS = re.compile(r"\s*[\r\n\u2028\u2029\x85]+\s*")
_RUNNER_COMMAND = re.compile(r"^(\s*)(?=::)|(?<=##)(?=\[)", re.MULTILINE)
"""Positions at which GitHub's runner would read a command in a line of output."""


def escape_controls(text: str) -> str:
    """Return a text with control characters as numbers, and without commands to GitHub's runner."""
    text = _CONTROL_CHARACTERS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
    return _RUNNER_COMMAND.sub(r"\1\\", text)


MAX_FULL_TEXT_CHARS = 4000
"""Maximum characters of a text to be shown in full; no verdict is longer."""


def indented_line(text: str) -> str:
    """Return a whole text on one line, with its indentation."""
    return text[: len(text) - len(text.lstrip(" "))] + one_line(text, MAX_FULL_TEXT_CHARS)


def one_line(text: str, max_chars: int = 300) -> str:
    """Return a text on one line, cut if it is long."""
    text = escape_controls(_LINE_BREAKS.sub(" ", text).strip())
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def markdown_code(text: str, max_chars: int = 300) -> str:
    """Return a text as code for a Markdown table; nothing in it is Markdown, HTML or a mention."""
    text = one_line(text, max_chars).replace("|", "\\|")
    if not text:
        return ""
    fence = "`" * (max((len(run) for run in re.findall(r"`+", text)), default=0) + 1)
    return f"{fence} {text} {fence}" if text[0] == "`" or text[-1] == "`" else f"{fence}{text}{fence}"
