"""Names of environment variables that look like secrets."""

from __future__ import annotations

import re

_SECRET = re.compile(
    r"(^|_)(API_?KEYS?|(ACCESS|PRIVATE|SECRET|SIGNING|ENCRYPTION|SSH|LICENSE)_KEY|[A-Z]*TOKEN|SECRETS?|"
    r"PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH|COOKIE)(_|$)"
)


def looks_secret(name: str) -> bool:
    """Whether a variable's name looks like a secret that no kernel should see."""
    return _SECRET.search(name.upper()) is not None
