"""Files that go with the kernels of a custom operator, so that they can be judged elsewhere.

These are the cases, the reference, and the modules that those import.
"""

from __future__ import annotations

import filecmp
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath

from opforge.cache import write_atomically
from opforge.kernels.custom_folder import CustomFolder
from opforge.kernels.source import imported_modules


@dataclass(frozen=True, slots=True)
class CompanionFiles:
    """Files of an operator's folder, by their relative path."""

    copied: dict[PurePath, Path]
    """Files that are copied unchanged."""
    generated: dict[PurePath, str]
    """Generated files with their text: a reference, if an implementation serves as one."""
    reference_sources: dict[str, str]
    """Text of the reference, and of the modules beside it that it imports."""

    @classmethod
    def from_folder(cls, folder: CustomFolder) -> CompanionFiles:
        """Return the files for an operator's kernels; other implementations only if imported."""
        reference = Path(folder.reference.file or "")
        text = _text(reference)
        reference_path = PurePath(f"{folder.op}_reference.py")
        present = dict(_files(folder.path))
        generated: dict[PurePath, str] = {}
        if folder.entry in folder.reference.entries:
            generated[reference_path] = f"{text.rstrip()}\n\n\n{folder.op}_reference = {folder.entry}\n"
        others = {relative: file for relative, file in present.items() if relative != reference_path}
        implementations = {PurePath(file.name) for file in folder.implementations}
        kept = {relative: file for relative, file in present.items() if relative not in {*implementations, *generated}}
        kept |= _imported_modules([text, *map(_text, kept.values())], others)
        shown = {(reference_path if not generated else PurePath(reference.name)).name: text}
        shown |= {str(relative): _text(file) for relative, file in _imported_modules([text], others).items()}
        return cls(kept, generated, shown)

    def conflicts_in(self, folder: Path) -> list[str]:
        """Return the files that exist in a folder with different contents."""
        others = [p for p, file in self.copied.items() if (folder / p).exists() and not _same(folder / p, file)]
        others += [p for p, text in self.generated.items() if (folder / p).exists() and _text(folder / p) != text]
        return sorted(map(str, others))

    def copy_to(self, folder: Path) -> None:
        """Write the files into a folder; existing files stay unchanged."""
        for relative, file in self.copied.items():
            if not (folder / relative).exists():
                _copy(file, folder / relative)
        for relative, text in self.generated.items():
            if not (folder / relative).exists():
                write_atomically(folder / relative, text)


def _files(folder: Path) -> Iterable[tuple[PurePath, Path]]:
    """Yield the files of a folder, except hidden files and ``__pycache__``."""
    for file in sorted(folder.rglob("*")):
        relative = file.relative_to(folder)
        hidden = any(part.startswith(".") or part == "__pycache__" for part in relative.parts)
        if file.is_file() and not hidden:
            yield relative, file


def _imported_modules(texts: list[str], files: dict[PurePath, Path]) -> dict[PurePath, Path]:
    """Return the modules among the files that sources import, directly or indirectly."""
    modules: dict[PurePath, Path] = {}
    while texts:
        names = {name for text in texts for name in imported_modules(text)}
        new = {
            p: f
            for p, f in files.items()
            if p not in modules and p.suffix == ".py" and p.with_suffix("").parts[0] in names
        }
        modules |= new
        texts = [_text(file) for file in new.values()]
    return modules


def _text(file: Path) -> str:
    """Return a Python source; an empty string for other files."""
    return file.read_text(encoding="utf-8", errors="replace") if file.suffix == ".py" else ""


def _same(one: Path, other: Path) -> bool:
    return filecmp.cmp(one, other, shallow=False)


def _copy(source: Path, target: Path) -> None:
    """Copy a file atomically."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as handle,
        source.open("rb") as contents,
    ):
        shutil.copyfileobj(contents, handle)
    Path(handle.name).replace(target)
