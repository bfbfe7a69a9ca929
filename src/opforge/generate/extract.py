"""Extract the code from a model's reply, however it is wrapped."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_FENCE = re.compile(r"^[ \t]{0,8}(`{3,}|~{3,})[ \t]*([^\s`]*)[^\n`]*$")
_FENCE_TAGS = {
    ".py": {"python", "py", "python3", "triton", "helion", "cutedsl", "torch", "pytorch"},
    ".cpp": {"cpp", "c++", "cxx", "cc", "c"},
    ".cu": {"cuda", "cu", "cpp", "c++", "cxx"},
}
_PYTHON_START = re.compile(r"(?:import|from|def|class|@|#|\"\"\"|''')")
_NATIVE_START = re.compile(r"(?:#include|//|/\*|#pragma|#define|using )")
_LIBRARY_REGISTRATION = re.compile(r"\b(?:STABLE_)?TORCH_LIBRARY(?:_FRAGMENT)?\s*\(")


@dataclass(frozen=True, slots=True)
class Code:
    """A kernel's source."""

    text: str


@dataclass(frozen=True, slots=True)
class NoCode:
    """A reply without a kernel, with the reason as a message to the model."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Block:
    tag: str
    text: str
    closed: bool


def extract(reply: str, entry: str, suffix: str) -> Code | NoCode:
    """Return the source that defines the function (or registers the operator) ``entry``.

    Of several, the last one that parses is taken, or else the last one.
    """
    exports = _python_exports if suffix == ".py" else _native_exports
    blocks = [block for block in _fenced_blocks(reply) if block.text.strip()]
    candidates = [block for block in blocks if exports(block.text, entry)]
    if candidates:
        complete = [block for block in candidates if _parses(block.text, suffix)]
        best = (complete or candidates)[-1]
        if not best.closed and not complete:
            return NoCode("the reply ends inside the code")
        return Code(_dedented(best.text))
    if blocks:
        tagged = [block for block in blocks if block.tag in _FENCE_TAGS[suffix]] or blocks
        if suffix == ".py" and (joined := _joined(tagged, entry)):
            return Code(joined)
        return NoCode(f"none of the {len(blocks)} code blocks in the reply has {_expected_definition(entry, suffix)}")
    unfenced = _unfenced_code(reply, suffix)
    if unfenced and exports(unfenced, entry):
        return Code(_dedented(unfenced))
    return NoCode(f"the reply has no code block, and no {_expected_definition(entry, suffix)}")


def _expected_definition(entry: str, suffix: str) -> str:
    return f"function {entry}" if suffix == ".py" else f"operator {entry} that is registered with TORCH_LIBRARY"


def _fenced_blocks(reply: str) -> Iterator[_Block]:
    """Yield the fenced code blocks; the last one may have no closing fence."""
    fence, tag, lines = "", "", list[str]()
    for line in reply.splitlines():
        mark = _FENCE.match(line)
        if not fence and mark:
            fence, tag, lines = mark[1], mark[2].lower().strip("{}."), []
        elif fence and mark and mark[1].startswith(fence) and not mark[2]:
            yield _Block(tag, "\n".join(lines), closed=True)
            fence = ""
        elif fence:
            lines.append(line)
    if fence:
        yield _Block(tag, "\n".join(lines), closed=False)


def _python_exports(text: str, entry: str) -> bool:
    """Whether a source binds a name at top level; found by regex if it does not parse."""
    try:
        tree = ast.parse(_dedented(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return re.search(rf"^(?:def\s+{entry}\s*\(|{entry}\s*=)", _dedented(text), re.MULTILINE) is not None
    return any(entry in _bound(node) for node in tree.body)


def _bound(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    if isinstance(node, ast.If | ast.Try | ast.With):
        return {name for inner in node.body for name in _bound(inner)}
    return set()


def _native_exports(text: str, entry: str) -> bool:
    """Whether a C++ or CUDA source registers an operator; the judge checks which one."""
    return _LIBRARY_REGISTRATION.search(text) is not None and entry.removesuffix("_kernel_impl") in text


def _parses(text: str, suffix: str) -> bool:
    if suffix != ".py":
        return text.count("{") == text.count("}")
    try:
        ast.parse(_dedented(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _joined(blocks: Sequence[_Block], entry: str) -> str:
    """Return all blocks as one source if only together they define the function.

    This helps when a class or a decorator is shown in a block of its own.
    """
    text = "\n\n".join(_dedented(block.text) for block in blocks)
    return text if _parses(text, ".py") and _python_exports(text, entry) else ""


def _unfenced_code(reply: str, suffix: str) -> str:
    """Return the code in a reply without fences.

    It starts at the first line that looks like code and ends at the last line that parses with it.
    """
    start_pattern = _PYTHON_START if suffix == ".py" else _NATIVE_START
    lines = reply.splitlines()
    starts = [number for number, line in enumerate(lines) if start_pattern.match(line)]
    for start in starts[:20]:
        for end in range(len(lines), start, -1):
            text = "\n".join(lines[start:end])
            if suffix != ".py":
                return text[: text.rfind("}") + 1]
            if _parses(text, suffix):
                return text
            if len(lines) - end > 60:  # models end with less prose than this
                break
    return ""


def _dedented(text: str) -> str:
    """Remove the common indentation, and end with a newline."""
    lines = text.expandtabs(4).splitlines() if text.lstrip("\n").startswith("\t") else text.splitlines()
    indents = [len(line) - len(line.lstrip(" ")) for line in lines if line.strip()]
    common_indent = min(indents, default=0)
    return "\n".join(line[common_indent:].rstrip() for line in lines).strip("\n") + "\n"
