"""Confinement of kernels, and detection of forbidden calls and of tampering."""
