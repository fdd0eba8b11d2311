"""Shows what the jobs of a host do: in a terminal, on a page, and as metrics. It only reads, and never asks an agent.

What is shown comes from `summary.py`, everywhere: equal events and status pages give equal numbers.
"""
