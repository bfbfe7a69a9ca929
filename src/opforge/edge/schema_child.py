"""Compare the YAML file's schemas with the registered ones.

Run as ``python -m opforge.edge.schema_child REQUEST ANSWER``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opforge.edge.asking import answer
from opforge.edge.operators import Entry
from opforge.edge.registered import check_schemas, import_definitions


def check(request: dict[str, Any]) -> dict[str, Any]:
    path = Path(request["definitions"])
    import_definitions(path)
    check_schemas([Entry(**row) for row in request["entries"]], path.name)
    return {}


if __name__ == "__main__":
    answer(check)
