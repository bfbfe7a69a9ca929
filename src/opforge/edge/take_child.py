"""List the operators that a package registers.

Run as ``python -m opforge.edge.take_child REQUEST ANSWER``.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

from opforge.edge.child import answer_request
from opforge.errors import OpforgeError, UnknownNameError
from opforge.sandbox.guest.loader import describe_exception


def describe(request: dict[str, Any]) -> dict[str, Any]:
    package, requested = request["package"], request["ops"]
    sys.path.insert(0, request["folder"])
    before = set(_names())
    try:
        importlib.import_module(package)
    except Exception as error:  # noqa: BLE001  # the user's package may raise anything, which is reported
        raise OpforgeError(f"the package {package} cannot be imported: {describe_exception(error)}") from None
    added = sorted(set(_names()) - before)
    schemas = {name: _schema(name) for name in added if "." not in name}
    if not schemas:
        raise OpforgeError(f"importing {package} registers no operator; give the package that registers it")
    return {"ops": [_row(name, schemas[name]) for name in _chosen(schemas, requested)]}


def _names() -> list[str]:
    names: list[str] = torch._C._dispatch_get_all_op_names()  # noqa: SLF001  # torch has no public list of operators
    return names


def _schema(name: str) -> Any:
    return torch._C._get_schema(name, "")  # noqa: SLF001  # torch has no public name for it


def _chosen(schemas: dict[str, Any], requested: list[str]) -> list[str]:
    """Return the named operators. Names may omit the namespace."""
    chosen = []
    for word in requested:
        matches = [name for name in schemas if word in (name, name.partition("::")[2])]
        if not matches:
            raise UnknownNameError("operator", word, [name.partition("::")[2] for name in schemas])
        chosen += matches
    return list(dict.fromkeys(chosen))


def _row(name: str, schema: Any) -> dict[str, Any]:
    arguments = [
        {
            "name": argument.name,
            "type": str(argument.type),
            "required": not argument.has_default_value(),
            "keyword": argument.kwarg_only,
        }
        for argument in schema.arguments
    ]
    return {"name": name, "schema": str(schema), "arguments": arguments}


if __name__ == "__main__":
    answer_request(describe)
