"""`join`: makes a rank's manager from its rendezvous and its snapshot server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from elasticgang.checkpoint.locations import check_lasting
from elasticgang.checkpoint.saver import DurableCheckpoints
from elasticgang.checkpoint.schedule import Schedule
from elasticgang.comm.availability import check_available
from elasticgang.comm.kinds import check_process_group, default_process_group
from elasticgang.comm.nccl_settings import apply_nccl_settings
from elasticgang.environment import heal_interfaces, layout_text
from elasticgang.errors import InvalidOperationError, NotSupportedError
from elasticgang.gang import get_default_device, get_world_size
from elasticgang.layout import ParallelLayout
from elasticgang.member.interfaces import Rendezvous
from elasticgang.member.local_rendezvous import LocalRendezvous
from elasticgang.member.manager import QuorumManager
from elasticgang.member.rank_context import inherited
from elasticgang.member.rendezvous import ElasticRendezvous
from elasticgang.reshape.state_mover import StateMover
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

    `layout`: the same on every rank. The default is that of `elasticgang run --layout`, and without it
    `ParallelLayout()`, in which every rank holds the whole model.

    `device`: where the gangs' tensors are, as `manager.device` afterwards. The default, also for "cuda" without an
    index, is `get_default_device()`: the CUDA device of this rank if CUDA is available, otherwise the CPU. A CUDA
    device becomes torch's current one.

    `process_group`: the process groups of the gangs, the same on every rank. Either a name, as for `elasticgang run
    --process-group`, or a function that makes a torchft `ProcessGroup`. The runtime calls it once for each gang (gangs
    of the same ranks share a group), and then the group's `configure` in every generation, and its `abort`. The default
    is that option's, and without it "nccl" on CUDA and "isolated-gloo" on the CPU. Votes always use isolated Gloo.
    "isolated-gloo" also takes tensors on CUDA, through memory of the host: for tests, and where ranks share a device.

    Raises:
        ValueError: `process_group` is not a valid name, or the group does not support `device`.
        NotSupportedError: the process group is not available on this machine; `device` is "cuda" without CUDA; or a
            TORCH_NCCL_ variable has a value with which torch ends healthy ranks.
        OperationalError: this rank has no CUDA device, because the host has more ranks than devices.
        InvalidOperationError: called twice in one process; or WORLD_SIZE is greater than 1 but another launcher started
            the processes, so that each would train alone.
        LayoutError: the process is alone, and `layout` needs more than one rank.
    """
    global _joined
    named_layout = layout_text()
    layout = layout or (ParallelLayout() if named_layout is None else ParallelLayout.parse(named_layout))
    device = _choose_device(device)
    context = inherited()
    named = process_group
    if named is None and context is not None:
        named = context.process_group
    groups = default_process_group(device.type) if named is None else named
    if context is not None or named is not None:
        _check_process_group(groups, device)
    if context is not None and _joined:
        raise InvalidOperationError("this process has joined already; a rank process has one manager")
    if context is None:
        _refuse_other_launchers()
    _joined = True
    if device.type == "cuda":
        apply_nccl_settings(os.environ)  # SURVIVE-1; also for a function that makes the groups
        torch.cuda.set_device(device)  # NCCL, and tensors of the script without an index, use the current device
    rendezvous: Rendezvous
    if context is None:
        rendezvous, state_server = LocalRendezvous(layout, device), SnapshotServer()
        mover = StateMover(state_server) if layout.fallback else None
    else:
        rendezvous, state_server = (
            ElasticRendezvous(context, layout, device, groups),
            SnapshotServer(
                context.host,
                context.job,
                context.credentials,
                context.drain.page.set_healing,
                heal_interfaces(),
                context.optimizer_bytes,
            ),
        )
        mover = StateMover(state_server, context.drain.page.set_healing) if layout.fallback else None

    def make_checkpoints(
        location: str, every_steps: int | None, every_seconds: float | None, keep: int
    ) -> DurableCheckpoints:
        check_lasting(location)
        schedule = Schedule(every_steps, every_seconds, clock=time.monotonic)
        told = () if context is None else (context.drain.page.set_saving, context.has_trained)
        return DurableCheckpoints(location, schedule, keep, state_server, rendezvous.tell_saved, *told)

    return QuorumManager(rendezvous, state_server, layout, device, make_checkpoints, mover)


def _choose_device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return get_default_device()
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise NotSupportedError(f"`device` is {device}, but CUDA is not available.")
    return get_default_device() if device == torch.device("cuda") else device


def _check_process_group(process_group: object, device: torch.device) -> None:
    if callable(process_group) and not isinstance(process_group, str):
        return
    check_process_group(process_group)
    name = str(process_group)
    check_available(name)
    if name == "isolated-gloo":  # it copies through memory of the host anyway
        return
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
