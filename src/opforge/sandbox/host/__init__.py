"""The trusted side of the sandbox: the fork server, its clients and its folders."""
