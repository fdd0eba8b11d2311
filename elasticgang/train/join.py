"""Where a rank's rooms are put together."""

from __future__ import annotations

import os

import torch

from elasticgang.errors import InvalidOperationError
from elasticgang.gang import get_world_size
from elasticgang.layout import ParallelLayout
from elasticgang.quorum.link import inherited
from elasticgang.quorum.manager import QuorumManager
from elasticgang.quorum.membership import AloneMembership, ElasticMembership, Membership
from elasticgang.state.keeper import Keeper

_joined = False


def join(*, layout: ParallelLayout | None = None, device: torch.device | str | None = None) -> QuorumManager:
    """Become a member of the job that this process was started for by `elasticgang run`; in any other process, of a
    job of one, with fake gangs and without coordinator or subprocess. Nothing is sent before the first step.

    Raises:
        InvalidOperationError: called twice in one process; or WORLD_SIZE says that this is one of several processes,
            but another launcher started them, so that each would train alone.
        LayoutError: alone, and `layout` needs more than one rank.
    """
    global _joined
    layout = layout or ParallelLayout()
    device = torch.device(device or "cpu")
    context = inherited()
    if context is not None and _joined:
        raise InvalidOperationError("this process has joined already; there is one manager to a rank process")
    if context is None:
        _refuse_other_launchers()
    _joined = True
    membership: Membership
    if context is None:
        membership, keeper = AloneMembership(layout, device), Keeper()
    else:
        membership, keeper = ElasticMembership(context, layout, device), Keeper(context.host)
    return QuorumManager(membership, keeper, layout, device)


def _refuse_other_launchers() -> None:
    size = get_world_size() if "WORLD_SIZE" in os.environ else 1
    if size > 1:
        raise InvalidOperationError(
            f"WORLD_SIZE is {size}, but `elasticgang run` did not start this process as a rank, so that each of the "
            f"{size} would train alone. Start the script with `elasticgang run` in place of torchrun, or unset "
            "WORLD_SIZE to train alone."
        )
