"""Calls of the reference: ATen, or a user's own function."""
