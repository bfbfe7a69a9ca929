"""Kernel generation with language models."""
