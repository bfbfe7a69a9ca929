"""Record the operator calls that real programs make."""
