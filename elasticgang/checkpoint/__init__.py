"""Durable checkpoints: their format, how ranks write them without collectives, and how they are read."""
