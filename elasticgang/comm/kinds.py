"""The names of the process groups for a job's data. Imports no torch, because the command line needs it."""

from __future__ import annotations

PROCESS_GROUPS = ("isolated-gloo", "gloo", "nccl", "isolated-nccl")
DEFAULT_PROCESS_GROUP = "isolated-gloo"


def check_process_group(name: object) -> None:
    """Raises ValueError: `name` is not one of `PROCESS_GROUPS`."""
    if name not in list(PROCESS_GROUPS):  # a list, because `name` may be unhashable
        raise ValueError(f"`process_group` must be one of {', '.join(PROCESS_GROUPS)}, but is {name!r} instead.")
