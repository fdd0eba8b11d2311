"""The coordinator's server, and an agent's client of it."""
