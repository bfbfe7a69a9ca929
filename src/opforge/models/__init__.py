"""Run a whole model with kernels in place, hold it against ATen and float64, and find the kernel that is to blame."""
