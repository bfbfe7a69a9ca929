"""The OpInfo suite: calls made by PyTorch's own test database, recorded once as cases."""
