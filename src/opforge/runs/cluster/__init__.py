"""Kernels judged by a Ray cluster: what is shipped, where it is placed, what runs on a node, and what is done when one is lost."""
