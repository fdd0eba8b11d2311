"""Who sits where: what the user declares, the plan of a generation, and the groups along named axes. Pure."""

from elasticgang.layout.grid import Axes, Grid, View, groups_over
from elasticgang.layout.layout import AXES, FAMILIES, MODEL_AXES, ParallelLayout
from elasticgang.layout.planner import Member, Plan, plan

__all__ = [
    "AXES",
    "FAMILIES",
    "MODEL_AXES",
    "Axes",
    "Grid",
    "Member",
    "ParallelLayout",
    "Plan",
    "View",
    "groups_over",
    "plan",
]
