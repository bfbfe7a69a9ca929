"""Run a whole model with kernels, compare it with ATen and float64, and find the faulty kernels."""
