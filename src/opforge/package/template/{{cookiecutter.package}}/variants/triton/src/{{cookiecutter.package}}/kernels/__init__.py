"""The Triton kernels, a file for each operator."""
