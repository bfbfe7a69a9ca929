"""Export many models in one process: ``python -m tests.edge.exporting FOLDER``. Prints a JSON object: by model, what was said or which operators it has."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.library import Library

from opforge.edge.define import define
from opforge.edge.lowering import lower
from opforge.edge.model_loading import ModelToExport
from opforge.errors import OpforgeError
from tests.edge.folders import BODIES

LIBRARY = Library("my_ops", "FRAGMENT")


def register() -> None:
    for name in BODIES:
        define(f"my_ops::{name}(Tensor x) -> Tensor", lambda x: x * 3)
    define("my_ops::with_numpy(Tensor x) -> Tensor", lambda x: torch.from_numpy(x.numpy() * 3), fake=torch.empty_like)
    LIBRARY.define("lone(Tensor x) -> Tensor")
    LIBRARY.impl("lone", lambda x: x * 3, "CompositeExplicitAutograd")
    LIBRARY.define("other_names(Tensor x) -> Tensor")
    LIBRARY.define("other_names.out(Tensor y, *, Tensor(a!) out) -> Tensor(a!)")
    LIBRARY.impl("other_names", lambda x: x * 3, "CompositeExplicitAutograd")
    LIBRARY.define("no_fake(Tensor x) -> Tensor")
    LIBRARY.define("no_fake.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
    LIBRARY.impl("no_fake", lambda x: x * 3, "CPU")
    LIBRARY.define("composite(Tensor x) -> Tensor")
    LIBRARY.define("composite.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
    LIBRARY.impl("composite", lambda x: x * 3, "CompositeImplicitAutograd")


class Calls(torch.nn.Module):
    """Calls custom operators, one after the other."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            x = getattr(torch.ops.my_ops, name)(x)
        return x


class Beside(torch.nn.Module):
    """Has something for XNNPACK before and after a custom operator: the sum of each row, six times, in every column."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = (torch.nn.Linear(3, 3, bias=False) for _ in range(2))
        for layer, weight in ((self.before, 1.0), (self.after, 2 / 3)):
            torch.nn.init.constant_(layer.weight, weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.after(torch.ops.my_ops.mul3(self.before(x)))
        return y


class Fixed(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.my_ops.mul3(x.reshape(4, 3))


class AddsToo(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.my_ops.add(x) + x


DYNAMIC = {"x": {0: (1, 8)}}
ONLY_X = (torch.linspace(-2, 2, 12).reshape(4, 3),)
MODELS = {
    **{name: (Calls(name), {}, False) for name in BODIES},
    "both": (Calls("mul3", "also3"), {}, False),
    "varying": (Calls("mul3"), DYNAMIC, False),
    "varying_unsized": (Calls("unsized"), DYNAMIC, False),
    "with_numpy": (Calls("with_numpy"), {}, False),
    "adds_too": (AddsToo(), {}, False),
    "lone": (Calls("lone"), {}, False),
    "other_names": (Calls("other_names"), {}, False),
    "no_fake": (Calls("no_fake"), {}, False),
    "composite": (Calls("composite"), {}, False),
    "fixed": (Fixed(), DYNAMIC, False),
    "no_such_input": (Calls("mul3"), {"y": {0: (1, 8)}}, False),
    "no_such_dimension": (Calls("mul3"), {"x": {2: (1, 8)}}, False),
    "out_of_range": (Calls("mul3"), {"x": {0: (5, 8)}}, False),
    "delegated": (Beside(), {}, True),
}


def main(folder: Path) -> None:
    register()
    said: dict[str, object] = {}
    for name, (model, ranges, xnnpack) in MODELS.items():
        try:
            lowered = lower(ModelToExport(model, ONLY_X, None), ONLY_X, ranges, xnnpack=xnnpack)
        except OpforgeError as error:
            said[name] = str(error)
            continue
        (folder / f"{name}.pte").write_bytes(lowered.data)
        said[name] = [*lowered.operators, *(f"without {one}" for one in lowered.decomposed)]
        said[f"{name} delegates"] = lowered.delegated
    (folder / "said.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
