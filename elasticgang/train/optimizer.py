"""An optimizer whose `step` is a vote."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from elasticgang.quorum.manager import QuorumManager


class Optimizer:
    """`optimizer`, applied to a step by all ranks or by none. One to a manager."""

    def __init__(self, manager: QuorumManager, optimizer: torch.optim.Optimizer) -> None:
        self.optim = optimizer
        self._manager = manager

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.optim.param_groups
        return groups

    def step(self, *, weight: float, max_norm: float | None = None) -> bool:
        """Vote on the step and, when it is committed, apply it: gradients are divided by the sum of all ranks'
        `weight`, clipped to `max_norm` (2-norm over all parameters) if given, applied, and set to None.

        `weight`: what this rank's losses were summed over, samples or tokens; 0 when it had no slots.

        Returns True when the step is committed and this rank's state holds it, False when it is dropped; it is then
        tried again with the same samples. Blocks until that is known, through a generation change if need be.

        Raises:
            ValueError: `weight` is negative or not finite. Nothing was sent.
            InvalidOperationError: called outside `with step:`, or twice in it; or the weights of all ranks sum to 0.
        """
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"`weight` must be finite and at least 0, but is {weight} instead.")
        return self._manager.commit(float(weight), lambda total: self._apply(total, max_norm))

    def _apply(self, total: float, max_norm: float | None) -> None:
        gradients = self._gradients()
        torch._foreach_div_(gradients, total)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters(), max_norm)
        self.optim.step()
        self.optim.zero_grad(set_to_none=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optim.param_groups for parameter in group["params"]]

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters() if parameter.grad is not None]
