"""Judge corpora of kernels, many in one run: a suite made of given cases, and folders laid out as the directory backend wants them."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from opforge import registry
from opforge.cases import Case
from opforge.cases.case_files import BlobWriter
from opforge.cases.text import format_arguments
from opforge.cases.values import TensorSpec
from opforge.cases.wire import SHORT_DTYPES, from_torch
from opforge.ops import table
from opforge.runs import RunConfig, run
from opforge.runs.rows import ResultRow
from opforge.suites import LoadedSuite, SuiteOptions
from opforge.suites.base import Progress, no_progress

Item = TypeVar("Item")
BLOB = "corpus"


class CorpusSuite:
    """The cases that ``judge`` was given."""

    name = "corpus"
    loaded = LoadedSuite("corpus", {})

    def load(self, options: SuiteOptions, progress: Progress = no_progress) -> LoadedSuite:
        return self.loaded


class StoredCases:
    """Makes cases of real tensors, whose contents and geometry are kept in a blob."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writer = BlobWriter(path)

    def case(self, op: str, args: Iterable[Any], kwargs: Mapping[str, Any] | None = None, **fields: Any) -> Case:
        """Return a case for a call with these arguments."""
        digest = hashlib.blake2b(digest_size=16)

        def spec(tensor: torch.Tensor) -> TensorSpec:
            storage = bytes(tensor.untyped_storage().tolist())
            digest.update(storage)
            at = self._writer.add(storage, hashlib.blake2b(storage).digest())
            geometry = (tuple(tensor.shape), SHORT_DTYPES[tensor.dtype], tuple(tensor.stride()))
            return TensorSpec(*geometry, offset=tensor.storage_offset(), at=at, nbytes=len(storage))

        values = [from_torch(v, spec) for v in args]
        named = {name: from_torch(v, spec) for name, v in (kwargs or {}).items()}
        return Case.make(op, format_arguments(values, named), contents=digest.hexdigest(), blob=BLOB, **fields)

    def close(self) -> None:
        self._writer.close()


def folder_of(op: str) -> str:
    """Return the folder in which a kernel for one overload is looked for."""
    base, _, overload = op.partition(".")
    return base if table().resolve(base).name == op else f"{base}__{overload}"


def lay_out(kernels: Mapping[str, Path], root: Path) -> Path:
    """Copy kernels, by operator, into folders as the directory backend wants them."""
    for op, source in kernels.items():
        folder = root / folder_of(op)
        folder.mkdir(parents=True)
        shutil.copyfile(source, folder / f"{folder.name}_implementation_1.py")
    return root


def disjoint(items: Iterable[Item], key: Callable[[Item], str]) -> list[list[Item]]:
    """Return few groups in which no two items have one key: what can be judged in one run."""
    groups: list[dict[str, Item]] = []
    for item in items:
        home = next((group for group in groups if key(item) not in group), None)
        if home is None:
            home = {}
            groups.append(home)
        home[key(item)] = item
    return [list(group.values()) for group in groups]


@contextmanager
def prepared(cases: LoadedSuite) -> Iterator[None]:
    """Let runs find the corpus suite with these cases."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.BUILTIN["suites"], "corpus", f"{__name__}:CorpusSuite")
        patch.setattr(CorpusSuite, "loaded", cases)
        registry._entries.cache_clear()
        try:
            yield
        finally:
            registry._entries.cache_clear()


def judge(
    kernels: Mapping[str, Path],
    cases: Mapping[str, list[Case]],
    out: Path,
    *,
    blob: Path | None = None,
    **fields: Any,
) -> list[ResultRow]:
    """Judge kernels, by operator, on cases in one run, and return its rows."""
    directory = lay_out(kernels, out / "kernels")
    suite = LoadedSuite("corpus", cases, {} if blob is None else {BLOB: blob})
    with prepared(suite):
        config = RunConfig("corpus", "directory", ops_directory=str(directory), **fields)
        return list(run(config, out / "run").store.rows())
