"""The settings of torch's ProcessGroupNCCL with which a rank outlives the loss of a peer. Pure.

With its defaults torch ends a process whose collective fails or times out, whose watchdog stands still, or whose
watchdog meets a CUDA error. Here a failed collective costs a step, the agent finds ranks that hang, and a fault of the
device is reported before the process ends. After an error, the watchdog also sleeps for a minute by default, and the
group cannot be aborted meanwhile. torch reads these variables when it makes a process group.

SURVIVE-1  Each variable has the value of `_SETTINGS` before a group over NCCL is made. Another value of the user's is
    refused with the reason, and not replaced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

from elasticgang.errors import NotSupportedError


class _Setting(NamedTuple):
    """`names`: of the variable, the present one first. `allowed`: in lower case; the first is set. `reason`: what other
    values do."""

    names: tuple[str, ...]
    allowed: tuple[str, ...]
    reason: str


_FALSE = ("0", "n", "no", "f", "false")  # as torch reads them
_SETTINGS = (
    _Setting(
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"),
        ("2",),  # CleanUpOnly: abort the communicators
        "with 1 and 3 a rank ends when a peer is lost, and with 0 no collective times out",
    ),
    _Setting(
        ("TORCH_NCCL_ENABLE_MONITORING",),
        _FALSE,
        "torch would end a rank whose watchdog stands still, also while the rank aborts a generation",
    ),
    _Setting(
        ("TORCH_NCCL_RETHROW_CUDA_ERRORS",),
        _FALSE,
        "the watchdog would end a rank with SIGABRT before the rank has reported the fault of its device",
    ),
    _Setting(
        ("TORCH_NCCL_PROPAGATE_ERROR",),
        _FALSE,
        "the error of one rank would reach the others past the coordinator, and end them",
    ),
    _Setting(
        ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",),
        ("0",),
        "after an error the watchdog would sleep for four times as long, and hold up the abort of its group: the rank "
        "would be ended for that",
    ),
    _Setting(
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",),
        _FALSE,
        "after an error torch would write its flight recorder and the stacks of its threads, and hold up the abort of "
        "the process's first group",
    ),
)


def check_nccl_settings(environ: Mapping[str, str]) -> None:
    """Raises NotSupportedError: a variable has a value with which torch ends healthy ranks."""
    for setting in _SETTINGS:
        for name in setting.names:
            if name in environ and environ[name].lower() not in setting.allowed:
                raise NotSupportedError(
                    f"the environment variable {name} must be {setting.allowed[0]} or not set, but is "
                    f"{environ[name]!r} instead: {setting.reason}."
                )


def set_connect_timeout(environ: MutableMapping[str, str], timeout: float) -> None:
    """Let an NCCL group connect within `timeout` seconds, unless the user has set it: torch's default is 30 minutes."""
    environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(max(1, math.ceil(timeout))))


def apply_nccl_settings(environ: MutableMapping[str, str]) -> None:
    """Set the variables that are not set. Raises as `check_nccl_settings`; then nothing is set."""
    check_nccl_settings(environ)
    for setting in _SETTINGS:
        environ.setdefault(setting.names[0], setting.allowed[0])
