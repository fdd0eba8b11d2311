"""Whether this machine has a process group, found out without an import of torch into this process."""

from __future__ import annotations

import subprocess

from elasticgang.errors import NotSupportedError
from elasticgang.process.own_modules import command_of

_MODULE = "elasticgang.comm.availability"
_LIMIT_S = 120.0


def check_available(process_group: str) -> None:
    """Raise NotSupportedError if this machine does not have the process group. Only NCCL's are asked about: every build
    of torch for Linux has Gloo. torch is asked in a process of its own, because an agent imports none."""
    if process_group.endswith("nccl"):
        command = command_of(_MODULE, process_group)
        try:
            asked = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise NotSupportedError(f"torch was not imported within {_LIMIT_S:g} s, to look for NCCL") from None
        if asked.returncode:
            raise NotSupportedError(asked.stdout.strip() or asked.stderr.strip())
