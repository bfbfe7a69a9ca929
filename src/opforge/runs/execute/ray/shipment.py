"""Shipping to a node: kernels with the files they may read, and cases.

Tensors are shipped once per node, into its cache.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from opforge import cache
from opforge.runs.plan import Job
from opforge.runs.rows import ResultRow
from opforge.runtime import untrusted_files as files
from opforge.sandbox.guard import readable_paths

MAX_KERNEL_BYTES = 32 << 20
"""Maximum total size of one kernel's files."""
PIECE_BYTES = 32 << 20
_MAX_UNUSED_S = 7 * 24 * 3600.0
"""Shipped files are removed after this time without use."""

Pieces = list[Callable[[], bytes]]


@dataclass(frozen=True, slots=True)
class Bundle:
    """The files in a kernel's folder."""

    folder: str
    """Its path on the machine of origin."""
    files: Mapping[str, bytes]
    """Contents by path in the folder."""

    @property
    def digest(self) -> str:
        hasher = hashlib.sha256()
        for name, data in sorted(self.files.items()):
            hasher.update(f"{name}\0{len(data)}\0".encode() + data)
        return hasher.hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Shipment:
    """A kernel with some of its cases, and its files."""

    job: Job
    bundles: tuple[Bundle, ...]


def pack(job: Job) -> Shipment:
    """Return a job as data for another machine; a kernel with too many bytes is marked broken.

    Its verdicts then report the reason.
    """
    reference = job.kernel.reference
    kernel_files = [job.kernel.file, reference.file if reference is not None else None]
    bundles: dict[str, Bundle] = {}
    for file in filter(None, kernel_files):
        folder = str(Path(file).absolute().parent)
        contents = dict(_files(file, folder))
        if sum(map(len, contents.values())) > MAX_KERNEL_BYTES:
            reason = (
                f"it and the files that it imports or names take more than {MAX_KERNEL_BYTES >> 20} MiB, the limit "
                "for nodes"
            )
            return Shipment(replace(job, kernel=replace(job.kernel, broken=reason)), ())
        bundles[folder] = Bundle(folder, {**(bundles[folder].files if folder in bundles else {}), **contents})
    return Shipment(job, tuple(bundles.values()))


def _files(file: str, folder: str) -> Iterator[tuple[str, bytes]]:
    """Yield the files that the kernel may read, up to the size limit."""
    bytes_left = MAX_KERNEL_BYTES
    for path in dict.fromkeys([*readable_paths.kernel_readable_paths(file), file]):
        if bytes_left < 0 or not Path(path).is_relative_to(folder):
            continue
        with contextlib.suppress(OSError):  # loading the kernel reports it as missing
            data = files.read(Path(path))
            bytes_left -= len(data)
            yield os.path.relpath(path, folder), data


@dataclass(frozen=True, slots=True)
class UnpackedJob:
    """A job with its files on this machine."""

    job: Job
    folder_pairs: tuple[tuple[str, str], ...]
    """Folders on this machine, with their paths on the machine of origin."""

    def wire_rows(self, rows: list[ResultRow]) -> list[dict[str, Any]]:
        """Return verdict lines for the wire, with the user's original paths."""
        text = json.dumps([row.wire() for row in rows])
        for here, there in self.folder_pairs:
            text = text.replace(json.dumps(here)[1:-1], json.dumps(there)[1:-1])
        restored: list[dict[str, Any]] = json.loads(text)
        return restored


def unpack(shipment: Shipment) -> UnpackedJob:
    """Return a shipment's job with its files in this machine's cache; existing files are kept."""
    moved = {bundle.folder: str(_write_bundle(bundle)) for bundle in shipment.bundles}
    kernel = shipment.job.kernel
    kernel = replace(kernel, file=_moved(kernel.file, moved))
    if kernel.reference is not None:
        kernel = replace(kernel, reference=replace(kernel.reference, file=_moved(kernel.reference.file, moved)))
    return UnpackedJob(replace(shipment.job, kernel=kernel), tuple((here, there) for there, here in moved.items()))


def _moved(file: str | None, moved: Mapping[str, str]) -> str | None:
    if file is None:
        return None
    path = Path(file).absolute()
    return str(Path(moved.get(str(path.parent), path.parent)) / path.name)


def _write_bundle(bundle: Bundle) -> Path:
    root = _root("kernels")
    folder = root / bundle.digest
    if not folder.is_dir():
        _sweep(root)
        temporary = Path(tempfile.mkdtemp(dir=root, prefix=".new-"))
        for name, data in bundle.files.items():
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        temporary.chmod(0o755)
        try:
            temporary.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(temporary)
    _touch(folder)
    return folder


def blob_digest(blob: Path) -> str:
    """Return the digest of a blob's contents."""
    with blob.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()[:32]


def blob_pieces(blob: Path) -> Iterator[bytes]:
    """Yield a blob in pieces that fit an object store."""
    with blob.open("rb") as handle:
        while piece := handle.read(PIECE_BYTES):
            yield piece


def fetch_blob(digest: str, pieces: Pieces) -> Path:
    """Return a blob in this machine's cache; the first process that needs it fetches it once."""
    path = _root("blobs") / f"{digest}.safetensors"
    if not path.exists():
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                _sweep(path.parent)
                _write(path, pieces)
    _touch(path)
    return path


def _write(path: Path, pieces: Pieces) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as handle:
        for piece in pieces:
            handle.write(piece())
    Path(handle.name).rename(path)


def _root(kind: str) -> Path:
    root = cache.root() / "shipped" / kind
    root.mkdir(parents=True, exist_ok=True)
    return root


def _touch(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.utime(path)


@functools.cache
def _sweep(root: Path) -> None:
    """Remove files not used for days; done once per process."""
    for path in root.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _MAX_UNUSED_S:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
