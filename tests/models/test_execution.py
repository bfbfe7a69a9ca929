"""One model in one process: the same run again and again, in its own dtype and in float64."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from opforge.models.execution import Execution, ExecutionSettings
from opforge.models.model import LoadedModel, UnusableModelError, load_model
from opforge.models.target import ModelTarget

CPU = torch.device("cpu")


class Noisy(nn.Module):
    """Everything that makes two runs differ: dropout, statistics that are kept, draws, dtypes asked for by name."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        h = nn.functional.dropout(self.norm(self.first(x)), 0.3, self.training)
        h = h.to(torch.float32) * torch.tensor(1 / 3, dtype=torch.float32) + torch.rand(16) + torch.rand_like(h)
        return {"logits": self.last(h), "best": h.argmax(-1), "pair": (h, [h.sum()])}


def made(**how):
    torch.manual_seed(1)
    subject = LoadedModel.from_user(Noisy(), torch.randn(5, 8))
    return Execution(subject, ExecutionSettings(CPU, **how))


@pytest.mark.parametrize("train", [False, True])
def test_runs_are_the_same_from_the_start(train):
    execution = made(train=train, seed=3)
    first, second = execution.run(), execution.run()
    assert [n for n, _ in first] == [n for n, _ in second]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(first, second, strict=True))
    assert "output['pair'][1][0]" in dict(first)
    assert ("gradient of first.weight" in dict(first)) is train
    assert ("buffer norm.running_mean" in dict(first)) is train


@pytest.mark.parametrize("train", [False, True])
def test_float64_is_the_same_model_with_less_error(train):
    narrow, wide = dict(made(train=train).run()), dict(made(train=train, wide=True).run())
    assert list(narrow) == list(wide)
    assert not torch.equal(narrow["output['logits']"].double(), wide["output['logits']"])
    for name, tensor in narrow.items():
        if tensor.is_floating_point():
            assert wide[name].dtype == torch.float64
            assert torch.allclose(tensor.double(), wide[name], rtol=1e-4, atol=1e-5), name
        else:
            assert torch.equal(tensor, wide[name]), name


def test_nothing_is_rounded_on_the_way_in_float64():
    class Asks(nn.Module):
        def forward(self, x):
            return x.float() / 3 + torch.tensor(0.1) + torch.full((1,), 0.1, dtype=torch.float32)

    found = Execution(LoadedModel.from_user(Asks(), torch.ones(4)), ExecutionSettings(CPU, wide=True)).run()[0][1]
    assert torch.equal(found, torch.full((4,), 1 / 3 + 0.1 + 0.1, dtype=torch.float64))


def test_moves_are_small_and_the_same_in_both_precisions():
    plain, wide = made(), made(wide=True)
    still, moved, other = (dict(plain.run(m))["output['logits']"] for m in (0, 1, 2))
    assert 0 < (still - moved).abs().max() < 1e-5
    assert not torch.equal(moved, other)
    exact = dict(wide.run(1))["output['logits']"]
    assert (moved.double() - exact).abs().max() < 1e-5
    assert torch.equal(dict(plain.run(0))["output['logits']"], still)


def test_weights_and_inputs_take_a_dtype():
    found = dict(
        Execution(
            LoadedModel.from_user(nn.Linear(8, 4), torch.randn(2, 8)), ExecutionSettings(CPU, torch.bfloat16)
        ).run()
    )
    assert found["output"].dtype == torch.bfloat16


def test_the_losses():
    given = Execution(
        LoadedModel.from_user(nn.Linear(2, 2), torch.ones(1, 2), lambda output: output.sum()),
        ExecutionSettings(CPU, train=True),
    )
    assert torch.equal(dict(given.run())["gradient of weight"], torch.ones(2, 2))
    own = dict(
        Execution(LoadedModel.from_user(nn.Linear(2, 3), torch.ones(1, 2)), ExecutionSettings(CPU, train=True)).run()
    )
    assert len(own["gradient of bias"].unique()) == 3  # every element counts in its own way
    with pytest.raises(UnusableModelError, match=r"the loss is of shape \[1, 2\], not a tensor of one number"):
        Execution(
            LoadedModel.from_user(nn.Linear(2, 2), torch.ones(1, 2), lambda o: o), ExecutionSettings(CPU, train=True)
        ).run()
    with pytest.raises(UnusableModelError, match=r"define loss\(output\)"):
        Execution(LoadedModel.from_user(nn.Identity(), torch.ones(1, 2)), ExecutionSettings(CPU, train=True)).run()
    with pytest.raises(UnusableModelError, match="does not depend on any weight"):
        Execution(
            LoadedModel.from_user(nn.Identity(), torch.ones(2), lambda o: o.sum()), ExecutionSettings(CPU, train=True)
        ).run()


def test_inputs_may_be_named_and_nested():
    class Named(nn.Module):
        def forward(self, *, pair, scale):
            return pair[0] * scale + pair[1]

    subject = LoadedModel.from_user(Named(), {"pair": (torch.ones(2), [torch.ones(2)][0]), "scale": 3})
    assert torch.equal(Execution(subject, ExecutionSettings(CPU)).run()[0][1], torch.full((2,), 4.0))


FILE = """
import torch
def model():
    return torch.nn.Linear(2, 2)
def inputs():
    return torch.ones(1, 2)
"""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            FILE.replace("def model", "def modell"),
            r"mine.py does not define model\(\); it must define model\(\) and inputs",
        ),
        (FILE.replace("torch.nn.Linear(2, 2)", "3"), "the model is int, not a torch.nn.Module"),
        (FILE.replace("torch.ones(1, 2)", "3"), "the inputs are int; allowed: a tuple, a dict by name, or one tensor"),
        (
            FILE.replace("torch.ones(1, 2)", "1 / 0"),
            r"inputs\(\) of mine.py raised ZeroDivisionError: division by zero \(line 6\)",
        ),
        (FILE + "loss = 3\n", "loss is int, not a function"),
        ("def model(:\n", "mine.py, line 1: SyntaxError"),
    ],
)
def test_files_that_give_no_model_say_why(tmp_path, source, said):
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(UnusableModelError, match=said):
        load_model(ModelTarget("mine.py", file=str(tmp_path / "mine.py")))


def test_functions_of_modules_give_models_or_say_why(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    source = "import torch\ndef make():\n    return torch.nn.Linear(2, 2), torch.ones(2)\ndef odd():\n    return 3\n"
    (tmp_path / "models_of_mine.py").write_text(source)
    (tmp_path / "broken_module_of_mine.py").write_text("1 / 0\n")

    def of(module, function):
        return load_model(ModelTarget(f"{module}:{function}", module=module, function=function, folder=str(tmp_path)))

    assert isinstance(of("models_of_mine", "make").model, nn.Linear)
    with pytest.raises(UnusableModelError, match="models_of_mine has no function 'made'"):
        of("models_of_mine", "made")
    with pytest.raises(
        UnusableModelError,
        match=r"models_of_mine:odd returned int, not \(model, inputs\), optionally followed by a loss and an optimizer",
    ):
        of("models_of_mine", "odd")
    with pytest.raises(UnusableModelError, match="raised while it was imported: ZeroDivisionError"):
        of("broken_module_of_mine", "make")
