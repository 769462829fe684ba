"""The training loop and what belongs to one run of it."""
