"""Kernels by language models: providers, and what is built on them."""
