"""Native runtime: slots in C++ from which ATen's own kernels and C++ kernels are called without Python."""
