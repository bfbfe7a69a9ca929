"""Cases of calls with live tensors, whose contents are stored with them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from opforge.cases import Case, Phase
from opforge.cases.case_files import BLOB_FILE, BlobWriter
from opforge.cases.text import format_arguments
from opforge.errors import OpforgeError
from opforge.suites.given import GivenSuite
from opforge.suites.opinfo.case_recorder import Snapshot
from opforge.suites.opinfo.record_cases import store_tensors
from opforge.traces.capture import arguments_json, to_arguments

_BLOB_NAME = "live"


class LiveCases:
    """Makes cases of calls; floating-point tensors above 4 MiB get seeded contents."""

    def __init__(self, folder: Path, device: str) -> None:
        self._path = folder / BLOB_FILE
        self._blob = BlobWriter(self._path)
        self._device = torch.device(device).type
        self._cases: list[Case] = []

    def add(self, op: str, args: Iterable[Any], kwargs: Mapping[str, Any], phase: Phase) -> str:
        """Add a call and return the id of its case; equal calls have equal ids."""
        snapshot = Snapshot(self._device, keep=True)
        try:
            data = to_arguments(tuple(args), kwargs, snapshot.tensor)
        except TypeError as error:
            self._blob.close()
            raise OpforgeError(f"{op} cannot be judged on this call: {error}") from None
        text, tree = store_tensors(self._blob, format_arguments(*data), arguments_json(data), snapshot.storages)
        contents = hashlib.blake2b(b"".join(snapshot.storages), digest_size=16).hexdigest()
        case = Case.make(op, text, contents=contents, phase=phase, source="live", tree=tree, blob=_BLOB_NAME)
        self._cases.append(case)
        return case.id

    def suite(self) -> GivenSuite:
        """Return the suite of all calls; no further ones can be added."""
        self._blob.close()
        return GivenSuite(self._cases, {_BLOB_NAME: self._path})
