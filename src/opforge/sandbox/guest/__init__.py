"""Code that runs in a worker, beside the kernel."""
