"""Paths between noise and data, the distribution of t, and the loss."""
