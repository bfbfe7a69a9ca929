"""Compare the YAML file's schemas with the registered ones.

Run as ``python -m opforge.edge.schema_child REQUEST ANSWER``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opforge.edge.bindings import BindingEntry
from opforge.edge.child import answer_request
from opforge.edge.definitions import check_schemas, import_definitions


def check(request: dict[str, Any]) -> dict[str, Any]:
    path = Path(request["definitions"])
    import_definitions(path)
    check_schemas([BindingEntry(**row) for row in request["entries"]], path.name)
    return {}


if __name__ == "__main__":
    answer_request(check)
