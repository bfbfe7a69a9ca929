"""Tools for operator authors: package template, C++ and CUDA builds, operator checks, a doctor."""
