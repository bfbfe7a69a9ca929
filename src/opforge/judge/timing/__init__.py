"""Timing of a kernel against ATen."""
