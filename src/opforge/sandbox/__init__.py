"""The untrusted side: processes in which kernels run, and the server that forks them."""
