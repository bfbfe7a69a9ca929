"""Comparison of a kernel's results with the reference."""
