"""Layout and plans: what the user declares, the plan of a generation, and the groups along named axes. Pure."""

from elasticgang.integers import integer, integer_from
from elasticgang.layout.axes import (
    AXES,
    FAMILIES,
    MODEL_AXES,
    RUNTIME_GANGS,
    Axes,
    groups_over,
    groups_within,
    text_of_ranks,
)
from elasticgang.layout.grid import Grid, View
from elasticgang.layout.parallel_layout import ParallelLayout
from elasticgang.layout.planner import is_filled, plan
from elasticgang.layout.seat_plan import Member, ModelCoordinates, Plan

__all__ = [
    "AXES",
    "FAMILIES",
    "MODEL_AXES",
    "RUNTIME_GANGS",
    "Axes",
    "Grid",
    "Member",
    "ModelCoordinates",
    "ParallelLayout",
    "Plan",
    "View",
    "groups_over",
    "groups_within",
    "integer",
    "integer_from",
    "is_filled",
    "plan",
    "text_of_ranks",
]
