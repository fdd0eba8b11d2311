"""The names of the process groups for a job's data. Imports no torch, because the command line needs it."""

from __future__ import annotations

PROCESS_GROUPS = ("isolated-gloo", "gloo", "nccl", "isolated-nccl")
DEFAULT_PROCESS_GROUP = "isolated-gloo"
_DEFAULT_OF_CUDA = "nccl"


def default_process_group(device_type: str) -> str:
    """The process groups of a job whose user names none. `device_type`: "cpu" or "cuda"."""
    return _DEFAULT_OF_CUDA if device_type == "cuda" else DEFAULT_PROCESS_GROUP


def check_process_group(name: object) -> None:
    """Raises ValueError: `name` is not one of `PROCESS_GROUPS`."""
    if name not in list(PROCESS_GROUPS):  # a list, because `name` may be unhashable
        raise ValueError(f"`process_group` must be one of {', '.join(PROCESS_GROUPS)}, but is {name!r} instead.")
