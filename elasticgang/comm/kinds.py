"""The names of the process groups for a job's data. Imports little, because the command line needs it."""

from __future__ import annotations

from elasticgang.errors import NotSupportedError

PROCESS_GROUPS = ("isolated-gloo", "gloo", "nccl", "isolated-nccl")
DEFAULT_PROCESS_GROUP = "isolated-gloo"


def check_process_group(name: object) -> None:
    """Raise ValueError unless `name` is one of `PROCESS_GROUPS`."""
    if name not in list(PROCESS_GROUPS):  # a list, because `name` may be unhashable
        raise ValueError(f"`process_group` must be one of {', '.join(PROCESS_GROUPS)}, but is {name!r} instead.")


def check_available(name: str) -> None:
    """Raise NotSupportedError if this machine or this build of torch does not have the process group."""
    import torch
    import torch.distributed as dist

    backend = name.removeprefix("isolated-")
    if not (dist.is_nccl_available() if backend == "nccl" else dist.is_gloo_available()):
        raise NotSupportedError(f"{name} is not available: torch was built without {backend}.")
    if backend == "nccl" and not torch.cuda.is_available():
        raise NotSupportedError(f"{name} is not available: there is no CUDA device.")
