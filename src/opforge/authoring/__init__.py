"""What helps an author of operators: packages from a template, libraries built from C++ and CUDA, checks of what is registered, and a doctor."""
