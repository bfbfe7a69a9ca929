"""What keeps a kernel from files, network, other processes and ATen's own code, or notices it."""
