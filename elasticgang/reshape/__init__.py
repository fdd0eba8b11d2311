"""Moves the training state between the ranks when the job takes another layout."""
