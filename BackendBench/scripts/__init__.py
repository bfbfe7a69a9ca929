"""Commands under their known names."""
