"""Processes of Linux, and the channel between two of them."""
