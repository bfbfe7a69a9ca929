"""Refuse a setuptools that is too old, in one line. Everything else is in pyproject.toml."""

import sys

import setuptools

if int(setuptools.__version__.partition(".")[0]) < 77:
    sys.exit(f"setuptools 77 or newer is needed, not {setuptools.__version__}: pip install 'setuptools>=77'")

setuptools.setup()
