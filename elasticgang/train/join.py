"""Where a rank's rooms are put together."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from elasticgang.comm.kinds import DEFAULT_PROCESS_GROUP, check_available, check_process_group
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
    """Become a member of the job that this process was started for by `elasticgang run`; in any other process, of a
    job of one, with fake gangs and without coordinator or subprocess. Nothing is sent before the first step.

    `process_group`: what carries the collectives of the gangs, the same on every rank: a name that `elasticgang run
    --process-group` takes, whose choice is the default, or a function that makes a torchft `ProcessGroup`. It is
    called once for each gang (gangs of the same ranks share a group); the runtime then calls the group's `configure`
    in every generation, and its `abort`. Votes always use isolated Gloo.

    Raises:
        ValueError: `process_group` is no such name, or the group it names does not serve `device`.
        NotSupportedError: the process group it names is not available here.
        InvalidOperationError: called twice in one process; or WORLD_SIZE says that this is one of several processes,
            but another launcher started them, so that each would train alone.
        LayoutError: alone, and `layout` needs more than one rank.
    """
    global _joined
    layout = layout or ParallelLayout()
    device = torch.device(device or "cpu")
    context = inherited()
    if process_group is None and context is not None and context.process_group != DEFAULT_PROCESS_GROUP:
        process_group = context.process_group
    _check_process_group(process_group, device)
    if context is not None and _joined:
        raise InvalidOperationError("this process has joined already; there is one manager to a rank process")
    if context is None:
        _refuse_other_launchers()
    _joined = True
    rendezvous: Rendezvous
    if context is None:
        rendezvous, state_server = LocalRendezvous(layout, device), SnapshotServer()
    else:
        rendezvous, state_server = (
            ElasticRendezvous(context, layout, device, process_group),
            SnapshotServer(context.host),
        )
    return QuorumManager(rendezvous, state_server, layout, device)


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
