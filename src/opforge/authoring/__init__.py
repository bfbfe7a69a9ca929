"""What helps an author of operators: libraries built from C++ and CUDA, and a doctor for the installation that builds them."""
