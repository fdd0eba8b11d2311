"""Where a rank's rooms are put together."""

from __future__ import annotations

import torch

from elasticgang.errors import InvalidOperationError
from elasticgang.layout import ParallelLayout
from elasticgang.quorum.link import inherited
from elasticgang.quorum.manager import QuorumManager
from elasticgang.quorum.membership import AloneMembership, ElasticMembership, Membership
from elasticgang.state.keeper import Keeper

_joined = False


def join(*, layout: ParallelLayout | None = None, device: torch.device | str | None = None) -> QuorumManager:
    """Become a member of the job that this process was started for by `elasticgang run`; in any other process, of a
    job of one, with fake gangs and without coordinator or subprocess. Nothing is asked before the first step.

    Raises:
        InvalidOperationError: called twice in one process.
        LayoutError: alone, and `layout` needs more than one rank.
    """
    global _joined
    layout = layout or ParallelLayout()
    device = torch.device(device or "cpu")
    context = inherited()
    if context is not None and _joined:
        raise InvalidOperationError("this process has joined already; there is one manager to a rank process")
    _joined = True
    membership: Membership
    if context is None:
        membership, keeper = AloneMembership(layout, device), Keeper()
    else:
        membership, keeper = ElasticMembership(context, layout, device), Keeper(context.host)
    return QuorumManager(membership, keeper, layout, device)
