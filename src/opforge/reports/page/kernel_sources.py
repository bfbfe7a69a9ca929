"""Sources and proofs of a run's kernels.

Sources are shown as they were judged: a file that has changed since is not shown.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opforge.kernels.source import digest
from opforge.reports.page.case_data import pack
from opforge.reports.page.proof_text import ProofText
from opforge.runs.manifest import Manifest, PlannedKernel
from opforge.runs.score import Summary
from opforge.runtime import untrusted_files

_MAX_SOURCE_CHARS = 1 << 18
"""Maximum characters of a source to show."""


class Sources:
    """Sources and proofs by kernel number, read on demand."""

    def __init__(self, manifest: Manifest, summary: Summary) -> None:
        self._kernels = manifest.plan.kernels
        self._proofs = ProofText(manifest, summary)

    def names(self) -> list[str]:
        return [f"kernel:{number}" for number, kernel in enumerate(self._kernels) if kernel.file]

    def blob(self, name: str) -> list[str] | None:
        """Return the source ``kernel:N`` and its proof, or why there is none."""
        kind, _, number = name.partition(":")
        if kind != "kernel" or not number.isdecimal() or int(number) >= len(self._kernels):
            return None
        kernel = self._kernels[int(number)]
        text, remark = _source(kernel)
        proof = self._proofs.describe(kernel, Path(kernel.file)) if kernel.file else {}
        return [pack({"text": text, "remark": remark, "proof": proof})]


def kernel_rows(manifest: Manifest) -> list[dict[str, Any]]:
    """Return the facts on each kernel that the page shows at once."""
    names = ("name", "file", "digest", "hints", "reference")
    return [{name: value for name in names if (value := getattr(k, name))} for k in manifest.plan.kernels]


def _source(kernel: PlannedKernel) -> tuple[str, str]:
    """Return a kernel's source and a remark; the source must have the digest in the manifest."""
    if not kernel.file:
        return "", "ATen's own kernel, part of torch."
    path = Path(kernel.file)
    try:
        if digest(path) != kernel.digest:
            return "", f"{path} was changed or removed after the run, so its source is not shown."
        text = untrusted_files.read_text(path)
    except OSError as error:
        return "", f"{path} cannot be read: {error.strerror}"
    return text[:_MAX_SOURCE_CHARS], "" if len(
        text
    ) <= _MAX_SOURCE_CHARS else f"The first {_MAX_SOURCE_CHARS} of {len(text)} characters."
