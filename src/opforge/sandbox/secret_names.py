"""Names of environment variables that look as if they held a secret."""

from __future__ import annotations

import re

_SECRET = re.compile(
    r"(^|_)(API_?KEYS?|(ACCESS|PRIVATE|SECRET|SIGNING|ENCRYPTION|SSH|LICENSE)_KEY|[A-Z]*TOKEN|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|"
    r"CREDENTIALS?|AUTH|COOKIE)(_|$)"
)


def looks_secret(name: str) -> bool:
    """Whether a variable of this name is one that no kernel has any business with."""
    return _SECRET.search(name.upper()) is not None
