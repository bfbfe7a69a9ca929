"""The OpInfo suite: every call that PyTorch's own test database makes, recorded once and kept as cases."""
