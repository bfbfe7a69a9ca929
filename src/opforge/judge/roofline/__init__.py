"""The least time that a call can take on a machine, from its bytes and operations."""
