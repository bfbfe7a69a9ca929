"""Known-wrong versions of operators, which show how many wrong kernels the cases catch."""
