"""Commands under their known names."""

import sys
from collections.abc import Callable

from opforge.errors import OpforgeError


def exit_on_error(main: Callable[[], None]) -> None:
    """Run a script; an error that the user can fix ends it with a line and opforge's exit code."""
    try:
        main()
    except OpforgeError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
