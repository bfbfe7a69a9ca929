"""Suites under their known names."""
