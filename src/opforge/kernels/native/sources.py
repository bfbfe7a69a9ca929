"""Scan C++ and CUDA sources for the headers, namespaces and operators they use or register."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from opforge.runtime import untrusted_files

SUFFIXES = (".cpp", ".cu")
"""File suffixes of kernels."""
SOURCE_SUFFIXES = (*SUFFIXES, ".cc", ".cxx")
HEADER_SUFFIXES = (".h", ".hh", ".hpp", ".hxx", ".cuh", ".inl", ".inc", ".ipp", ".tpp")
_MAX_FILES = 20_000
SKIPPED_FOLDERS = ("build", "dist", "__pycache__")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]', re.MULTILINE)
_STABLE_ABI_PREFIXES = ("torch/csrc/stable/", "torch/headeronly/", "torch/csrc/inductor/aoti_torch/c/")
_PYTHON_HEADER = re.compile(r"Python\.h|pybind11/.*|torch/extension\.h|torch/python\.h|torch/csrc/.*python.*")
_BLOCK = re.compile(r"\b(?:STABLE_)?TORCH_LIBRARY(_FRAGMENT|_IMPL)?\s*\(\s*([A-Za-z_]\w*)\s*,")
_OPERATOR_DEFINITION = re.compile(
    r'\.\s*def\s*\(\s*(?:TORCH_SELECTIVE_\w+\s*\(\s*)?(?:R"(\w*)\(\s*(.*?)\)\1"|"((?:[^"\\]|\\.)*)")', re.DOTALL
)
_NAME = re.compile(r"\s*(?:([A-Za-z_]\w*)::)?([A-Za-z_]\w*(?:\.\w+)?)")
_MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+([A-Za-z_]\w*)(?!\w|\()[ \t]*(.*)$", re.MULTILINE)
_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\')', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Registration:
    """A TORCH_LIBRARY or TORCH_LIBRARY_FRAGMENT block, of the stable ABI or not."""

    file: Path
    line: int
    namespace: str
    claims_namespace: bool
    """Whether it claims the whole namespace, as TORCH_LIBRARY does and a fragment does not."""
    operators: tuple[str, ...]
    """The operators it defines, such as ``mm`` or ``mm.out``."""
    namespace_known: bool = True
    """Whether the namespace is known; else it is a macro that only the compiler can expand."""


def is_native(file: str | Path | None) -> bool:
    """Whether a kernel's file must be compiled."""
    return file is not None and str(file).endswith(SUFFIXES)


def sources_in(folder: Path) -> list[Path]:
    """Return the sources in a library's folder and its subfolders, except build folders."""
    return [path for path in _files(folder) if path.suffix in SOURCE_SUFFIXES]


def headers_in(folder: Path) -> list[Path]:
    """Return the headers in a source's folder and below it."""
    return [path for path in _files(folder) if path.suffix in HEADER_SUFFIXES]


def _files(folder: Path) -> list[Path]:
    paths = untrusted_files.files_below(folder, _MAX_FILES)
    return sorted(path for path in paths if not set(path.relative_to(folder).parts[:-1]) & set(SKIPPED_FOLDERS))


def without_comments(text: str) -> str:
    """Return a source with its comments blanked; line numbers stay the same."""
    return _COMMENT.sub(lambda match: match[1] or re.sub(r"[^\n]", " ", match[0]), text)


def includes(texts: Iterable[str]) -> set[str]:
    """Return the names of all headers that sources include."""
    return {name for text in texts for name in _INCLUDE.findall(without_comments(text))}


def needs_full_headers(included: Iterable[str]) -> bool:
    """Whether a header belongs to torch but not to its stable ABI."""
    return any(
        name.startswith(("torch/", "ATen/", "c10/", "caffe2/")) and not name.startswith(_STABLE_ABI_PREFIXES)
        for name in included
    )


def needs_python(included: Iterable[str]) -> bool:
    """Whether a header is Python's, or includes it."""
    return any(_PYTHON_HEADER.fullmatch(name) for name in included)


def registrations(
    file: Path, macros: Mapping[str, str] | None = None, headers: Iterable[Path] = ()
) -> list[Registration]:
    """Return the blocks of a source that define operators.

    ``macros`` maps macros to their values; those that the source and the headers define are added.
    """
    text = without_comments(file.read_text(errors="replace"))
    texts = [text, *(without_comments(header.read_text(errors="replace")) for header in headers)]
    return list(_registrations(file, text, {**_macros_in(texts), **(macros or {})}))


def _macros_in(texts: Iterable[str]) -> dict[str, str]:
    """Return the values of the macros that sources define; empty if not a single name."""
    values: dict[str, set[str]] = {}
    for name, value in itertools.chain.from_iterable(map(_MACRO.findall, texts)):
        values.setdefault(name, set()).add(value.strip())
    return {
        name: value if len(found) == 1 and re.fullmatch(r"[A-Za-z_]\w*", value := next(iter(found))) else ""
        for name, found in values.items()
    }


def _expand(name: str, macros: Mapping[str, str]) -> str:
    """Return the name that a macro stands for; empty if unknown."""
    for _ in range(len(macros) + 1):
        if name not in macros:
            return name
        name, previous = macros[name], name
        if name == previous:
            return name
    return ""


def _registrations(file: Path, text: str, macros: Mapping[str, str]) -> Iterator[Registration]:
    blocks = [match for match in _BLOCK.finditer(text) if not _in_macro_definition(text, match.start())]
    for number, match in enumerate(blocks):
        if match[1] == "_IMPL":
            continue
        end = blocks[number + 1].start() if number + 1 < len(blocks) else len(text)
        body = _braced_block(text[match.end() : end])
        namespace = _expand(match[2], macros)
        operators = tuple(dict.fromkeys(_operators(body)))
        line = text.count("\n", 0, match.start()) + 1
        yield Registration(file, line, namespace or match[2], match[1] is None, operators, bool(namespace))


def _in_macro_definition(text: str, offset: int) -> bool:
    """Whether an offset is on a line that defines a macro."""
    return text[text.rfind("\n", 0, offset) + 1 : offset].lstrip().startswith("#")


def _braced_block(text: str) -> str:
    """Return the text from the first brace to its matching brace."""
    depth, start = 0, text.find("{")
    for token in re.finditer(r'"(?:[^"\\\n]|\\.)*"|[{}]', text[start:]) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return text[start : start + token.end()]
    return text[max(start, 0) :]


def _operators(body: str) -> Iterator[str]:
    for _mark, raw, plain in _OPERATOR_DEFINITION.findall(body):
        if (match := _NAME.match(raw or plain)) is not None:
            yield match[2]
