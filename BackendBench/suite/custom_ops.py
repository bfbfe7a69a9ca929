"""``CustomOpsTestSuite``: the tests that users write in ``gen_input.py``."""

from collections.abc import Iterable
from pathlib import Path

from BackendBench.opregistry import CustomOperator
from opforge.kernels.custom_folder import find_custom_ops
from opforge.sandbox.guest.loader import import_file

from .base import OpTest, TestSuite


class CustomOpsTestSuite(TestSuite):
    """The tests of each implementation ``{op}__NAME``; ``gen_input.py`` runs in this process."""

    def __init__(
        self,
        name: str = "custom_ops",
        custom_ops_root: str | Path = "custom_ops",
        filter: Iterable[str] | None = None,  # noqa: A002
    ) -> None:
        found = find_custom_ops(Path(custom_ops_root))
        optests = []
        for op in found.folders if filter is None else found.select(list(filter)):
            folder = found.folders[op]
            if not folder.gen_input.is_file():
                continue
            inputs = import_file(folder.gen_input)
            optests += [
                OpTest(CustomOperator(kernel.name, op), inputs.get_correctness_tests(), inputs.get_performance_tests())
                for kernel in folder.kernels
            ]
        super().__init__(name, optests)
