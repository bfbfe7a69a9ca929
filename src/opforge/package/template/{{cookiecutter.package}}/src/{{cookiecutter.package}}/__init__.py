"""{{ cookiecutter.description.rstrip(".") }}."""

{% if cookiecutter.variant == "cpp" %}
from . import _library  # noqa: F401  # loads the operators
{% endif %}
from .ops import *
from .ops import __all__ as __all__
