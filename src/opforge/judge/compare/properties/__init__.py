"""Checks of results that may differ from ATen's, by the property that makes them right."""
