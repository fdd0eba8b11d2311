"""The parameters of a wrapped module whose gradients are reduced.

TRAINABLE-1  They are those that require gradients when the module is wrapped, whatever a script freezes later: every
    rank reduces the same ones in the same order, also one that starts later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from elasticgang.errors import InvalidOperationError


class Trainable:
    """Those of `module`, from now on."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._others = {name: each for name, each in module.named_parameters() if not each.requires_grad}

    def check(self) -> None:
        """Raises InvalidOperationError: another parameter requires gradients now."""
        for name, parameter in self._others.items():
            if parameter.requires_grad:
                raise InvalidOperationError(
                    f"{name} requires gradients now, but did not when the module was wrapped: the ranks do not reduce "
                    "its gradient. Wrap the module while all parameters to be trained require gradients, and freeze "
                    "them by `requires_grad_(False)` afterwards."
                )

    @contextlib.contextmanager
    def required(self) -> Iterator[None]:
        """A context in which these parameters require gradients, and no others (TRAINABLE-1)."""
        frozen = [parameter for parameter in self.parameters if not parameter.requires_grad]
        thawed = [parameter for parameter in self._others.values() if parameter.requires_grad]
        _require(frozen, thawed)
        try:
            yield
        finally:
            _require(thawed, frozen)


def _require(required: list[nn.Parameter], others: list[nn.Parameter]) -> None:
    for parameter in required:
        parameter.requires_grad_(True)
    for parameter in others:
        parameter.requires_grad_(False)
