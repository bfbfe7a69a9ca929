"""Suite of non-ATen operators, with cases from the ``gen_input.py`` beside the implementations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from opforge.cases import Case, Expect, Phase
from opforge.errors import InternalError
from opforge.kernels.custom_folder import GEN_INPUT, CustomFolder, CustomOps, find_custom_ops
from opforge.kernels.source import digest
from opforge.suites.base import LoadedSuite, Progress, SuiteOptions, no_progress

CASES, BLOB = "cases.json", "tensors.safetensors"


class CustomOpsSuite:
    """Operators of your own, under --custom-ops-root: each with the cases that its gen_input.py makes."""

    name = "custom_ops"

    def operators(self, options: SuiteOptions, names: Iterable[str]) -> list[str]:
        """Resolve names typed by the user to operators."""
        return find_custom_ops(options.custom_ops_root).select(names)

    def load(self, options: SuiteOptions, progress: Progress = no_progress) -> LoadedSuite:
        if options.folder is None or options.make_cases is None:
            raise InternalError("suite 'custom_ops' needs a folder for its cases")
        chosen = _chosen(find_custom_ops(options.custom_ops_root), options.ops)
        cases = _kept(options.folder) or self._made(chosen, options, options.folder, progress)
        return LoadedSuite(
            self.name,
            {op: cases[op] for op in chosen if op in cases},
            {self.name: options.folder / BLOB},
            tuple(_losses(cases)),
            {str(f): digest(f) for folder in chosen.values() for f in _sources(folder)},
        )

    def _made(
        self, chosen: dict[str, CustomFolder], options: SuiteOptions, target_folder: Path, progress: Progress
    ) -> dict[str, list[Case]]:
        """Generate the cases in the sandbox and store them."""
        files = {op: folder.gen_input for op, folder in chosen.items() if folder.gen_input.is_file()}
        make = options.make_cases
        cases = {} if make is None else make(files, target_folder / BLOB, self.name, progress)
        for op in chosen:
            if op not in files:
                reason = f"there is no {GEN_INPUT}; it must define get_correctness_tests() and get_performance_tests()"
                cases[op] = [Case.make(op, f"({GEN_INPUT})", source=GEN_INPUT, lost=reason)]
        rows = [asdict(case) for op_cases in cases.values() for case in op_cases]
        (target_folder / CASES).write_text(json.dumps(rows))
        return cases


def _chosen(custom_ops: CustomOps, ops: frozenset[str] | None) -> dict[str, CustomFolder]:
    return {op: folder for op, folder in custom_ops.folders.items() if ops is None or op in ops}


def _kept(folder: Path) -> dict[str, list[Case]]:
    """Return the cases stored by an interrupted run; empty if there are none."""
    if not (folder / CASES).is_file():
        return {}
    cases: dict[str, list[Case]] = {}
    for row in json.loads((folder / CASES).read_text()):
        case = _case(row)
        cases.setdefault(case.op, []).append(case)
    return cases


def _case(row: Mapping[str, Any]) -> Case:
    return Case(**{**row, "expect": Expect(row["expect"]), "phase": Phase(row["phase"])})


def _losses(cases: dict[str, list[Case]]) -> Iterable[str]:
    return (f"{case.op}: {case.lost}" for op_cases in cases.values() for case in op_cases if case.lost)


def _sources(folder: CustomFolder) -> Iterable[Path]:
    """Yield the files other than kernels that affect verdicts."""
    files = [folder.gen_input, folder.reference.file]
    return (Path(f).resolve() for f in files if f is not None and Path(f).is_file())
