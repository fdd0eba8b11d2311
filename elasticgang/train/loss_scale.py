"""How the scale of `torch.amp.GradScaler` follows from the steps. Pure; the rule is that of its `update`.

Its own `step` and `update` decide on one rank by that rank's gradients, in the middle of an apply. Here all ranks
have agreed whether the gradients of the step have overflowed before the first of them applies it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def next_state(state: Mapping[str, Any], *, overflows: bool) -> dict[str, Any]:
    """The scaler's `state_dict` after a step. `overflows`: a gradient of the step is not finite."""
    scale, num_sound = state["scale"], 0
    if overflows:
        scale *= state["backoff_factor"]
    else:
        num_sound = state["_growth_tracker"] + 1
        if num_sound == state["growth_interval"]:
            grown, num_sound = scale * state["growth_factor"], 0
            scale = grown if math.isfinite(grown) and grown <= _LARGEST else scale
    return {**state, "scale": scale, "_growth_tracker": num_sound}


_LARGEST = (2 - 2**-23) * 2.0**127  # of float32, which the scaler keeps its scale in
