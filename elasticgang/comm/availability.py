"""Checks whether this machine supports a process group.

The command `python -m elasticgang.comm.availability NAME` prints the reason and exits with 1 if it does not. The agent,
which must not import torch, runs this command.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from elasticgang.comm.nccl_settings import check_nccl_settings
from elasticgang.errors import NotSupportedError


def check_available(name: str) -> None:
    """Raises NotSupportedError: this machine, this build of torch or the environment does not support the process
    group."""
    backend = name.removeprefix("isolated-")
    if backend == "nccl":
        check_nccl_settings(os.environ)
    if not (dist.is_nccl_available() if backend == "nccl" else dist.is_gloo_available()):
        raise NotSupportedError(f"{name} is not available: torch was built without {backend}.")
    if backend == "nccl" and not torch.cuda.is_available():
        raise NotSupportedError(f"{name} is not available: there is no CUDA device.")


def main(name: str) -> int:
    try:
        check_available(name)
    except NotSupportedError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
