"""`join`: makes a rank's manager from its rendezvous and its snapshot server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from elasticgang.checkpoint.saver import DurableCheckpoints
from elasticgang.checkpoint.schedule import Schedule
from elasticgang.comm.availability import check_available
from elasticgang.comm.kinds import DEFAULT_PROCESS_GROUP, check_process_group
from elasticgang.errors import InvalidOperationError
from elasticgang.gang import get_world_size
from elasticgang.layout import ParallelLayout
from elasticgang.member.interfaces import Rendezvous
from elasticgang.member.local_rendezvous import LocalRendezvous
from elasticgang.member.manager import QuorumManager
from elasticgang.member.rank_context import inherited
from elasticgang.member.rendezvous import ElasticRendezvous
from elasticgang.state.snapshot_server import SnapshotServer

if TYPE_CHECKING:
    from torchft.process_group import ProcessGroup

_joined = False


def join(
    *,
    layout: ParallelLayout | None = None,
    device: torch.device | str | None = None,
    process_group: str | Callable[[], ProcessGroup] | None = None,
) -> QuorumManager:
    """Join the job for which `elasticgang run` started this process. In any other process, start a job of one rank,
    with fake gangs and without coordinator or subprocess. Nothing is sent before the first step.

    `process_group`: the process groups of the gangs, the same on every rank. Either a name, as for `elasticgang run
    --process-group`, which sets the default; or a function that makes a torchft `ProcessGroup`. The runtime calls it
    once for each gang (gangs of the same ranks share a group), and then the group's `configure` in every generation,
    and its `abort`. Votes always use isolated Gloo.

    Raises:
        ValueError: `process_group` is not a valid name, or the group does not support `device`.
        NotSupportedError: the process group is not available on this machine.
        InvalidOperationError: called twice in one process; or WORLD_SIZE is greater than 1 but another launcher started
            the processes, so that each would train alone.
        LayoutError: the process is alone, and `layout` needs more than one rank.
    """
    global _joined
    layout = layout or ParallelLayout()
    device = torch.device(device or "cpu")
    context = inherited()
    if process_group is None and context is not None and context.process_group != DEFAULT_PROCESS_GROUP:
        process_group = context.process_group
    _check_process_group(process_group, device)
    if context is not None and _joined:
        raise InvalidOperationError("this process has joined already; a rank process has one manager")
    if context is None:
        _refuse_other_launchers()
    _joined = True
    rendezvous: Rendezvous
    if context is None:
        rendezvous, state_server = LocalRendezvous(layout, device), SnapshotServer()
    else:
        rendezvous, state_server = (
            ElasticRendezvous(context, layout, device, process_group),
            SnapshotServer(context.host, context.job, context.credentials, context.drain.page.set_healing),
        )

    def make_checkpoints(
        location: str, every_steps: int | None, every_seconds: float | None, keep: int
    ) -> DurableCheckpoints:
        schedule = Schedule(every_steps, every_seconds, clock=time.monotonic)
        return DurableCheckpoints(location, schedule, keep, state_server)

    return QuorumManager(rendezvous, state_server, layout, device, make_checkpoints)


def _check_process_group(process_group: object, device: torch.device) -> None:
    if process_group is None or (callable(process_group) and not isinstance(process_group, str)):
        return
    check_process_group(process_group)
    name = str(process_group)
    check_available(name)
    wanted = "cuda" if name.endswith("nccl") else "cpu"
    if device.type != wanted:
        raise ValueError(f"`process_group` {name!r} is for tensors on {wanted}, but `device` is {device} instead.")


def _refuse_other_launchers() -> None:
    size = get_world_size() if "WORLD_SIZE" in os.environ else 1
    if size > 1:
        raise InvalidOperationError(
            f"WORLD_SIZE is {size}, but `elasticgang run` did not start this process as a rank, so that each of the "
            f"{size} would train alone. Start the script with `elasticgang run` in place of torchrun, or unset "
            "WORLD_SIZE to train alone."
        )
