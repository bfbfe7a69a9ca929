"""The package as a whole: whatever is registered has a fake, is exported and is typed."""

import inspect

import pytest
import torch
from torch import Tensor

import {{ cookiecutter.package }}
from {{ cookiecutter.package }}.namespace import Namespace

PREFIX = "{{ cookiecutter.package }}::"
NAMES = sorted(n.removeprefix(PREFIX) for n in torch._C._dispatch_get_all_op_names() if n.startswith(PREFIX))
TYPES = {"Tensor": Tensor, "Optional[Tensor]": Tensor | None, "float": float, "int": int, "bool": bool, "str": str}
TYPES |= {"List[int]": list[int], "List[float]": list[float]}


def overload(name):
    return getattr(torch.ops.{{ cookiecutter.package }}, name).default


def test_there_are_operators():
    assert {"swiglu", "swiglu_backward", "row_moments", "add_scaled_", "rms_norm"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_has_a_fake(name):
    wanted = f"register a fake: @torch.library.register_fake({PREFIX + name!r})"
    assert torch._library.utils.has_fake_kernel(overload(name)), wanted


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("_backward")])
def test_it_is_exported(name):
    assert name in {{ cookiecutter.package }}.__all__
    assert callable(getattr({{ cookiecutter.package }}, name))


@pytest.mark.parametrize("name", NAMES)
def test_it_is_in_the_namespace_as_the_schema_says(name):
    schema = overload(name)._schema
    method = getattr(Namespace, name, None)
    assert method is not None, f"add a method {name} to the class Namespace, as the schema says: {schema}"
    signature = inspect.signature(method)
    found = [(p.name, p.annotation, p.default is not p.empty) for p in list(signature.parameters.values())[1:]]
    assert found == [(a.name, TYPES[str(a.type)], a.has_default_value()) for a in schema.arguments]
    results = [TYPES[str(r.type)] for r in schema.returns]
    wanted = None if not results else results[0] if len(results) == 1 else tuple[tuple(results)]
    assert signature.return_annotation == wanted


def test_nothing_else_is_in_the_namespace():
    assert NAMES == sorted(name for name in vars(Namespace) if not name.startswith("_"))
