"""The agent: starts one host's ranks, watches them, and speaks for them."""
