"""The gangs of one rank in a plan: of which ranks each is, and the name of its process group. Pure."""

from __future__ import annotations

from elasticgang.layout.axes import RUNTIME_GANGS, text_of_ranks
from elasticgang.layout.parallel_layout import ParallelLayout
from elasticgang.layout.seat_plan import Plan

GANGS = ("root", "dp", "rdp", "sdp", "tp", "pp")
CONTROL, REDUCE, REDUCE_RDP = RUNTIME_GANGS  # for gradients alone; a user's collectives in a step keep their own order
_FAMILY_OF = {CONTROL: "root", REDUCE: "dp", REDUCE_RDP: "rdp"}


def user_gangs(layout: ParallelLayout) -> tuple[str, ...]:
    """The names of the gangs that a script uses."""
    return *GANGS, *layout.further_axes


def reduction_gangs(layout: ParallelLayout) -> tuple[str, ...]:
    """The names of the gangs that reduce gradients in `layout` or one of its fallbacks."""
    is_sharded = any(option.sdp > 1 for option in layout.options)
    return (REDUCE, REDUCE_RDP) if is_sharded else (REDUCE,)  # else dp and rdp are the same


def ranks_of_gang(plan: Plan, rank: int, name: str) -> tuple[int, ...]:
    """The ranks of the gang of that name which has `rank` in it, in order. Raises ValueError: no gang has this name."""
    return plan.group_of(_FAMILY_OF.get(name, name), rank)


def group_name(ranks: tuple[int, ...], name: str) -> str:
    """Of the process group of a gang. Gangs of the same ranks share one; the runtime's own do not. Each name has the
    ranks in it: groups of one name would meet under the same keys, and connect to each other."""
    among = text_of_ranks(ranks)
    return f"{name}:{among}" if name in _FAMILY_OF else among
