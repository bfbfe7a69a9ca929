"""What a run looks like to a person or another program."""
