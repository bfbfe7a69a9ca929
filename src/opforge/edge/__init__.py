"""Custom operators on the edge: ExecuTorch, from its PyPI package alone."""
