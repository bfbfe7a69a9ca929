"""``FactoTestSuite``: opforge has no FACTO."""

from typing import Any

from opforge.errors import OpforgeError


class FactoTestSuite:
    """Raises: use OpInfoTestSuite; the judge adds hostile variants of each call."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        raise OpforgeError("opforge has no FACTO; use OpInfoTestSuite: the judge adds hostile variants of each call")
