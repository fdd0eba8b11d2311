"""The parameters of a wrapped module whose gradients are reduced.

TRAINABLE-1  They are those that require gradients when the module is wrapped, whatever a script freezes, adds or takes
    out later: every rank reduces the same ones in the same order, also one that starts later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn

from elasticgang.errors import InvalidOperationError
from elasticgang.protocol.form import Form


class Trainable:
    """Those of `module`, from now on."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._dtypes = [parameter.dtype for parameter in self.parameters]
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

    def check_dtypes(self) -> None:
        """Raises InvalidOperationError: a parameter has another dtype than the memory for its gradient."""
        for parameter, dtype in zip(self.parameters, self._dtypes, strict=True):
            if parameter.dtype is not dtype:
                raise InvalidOperationError(
                    f"{self._names[id(parameter)]} is {str(parameter.dtype)[6:]} now, but was {str(dtype)[6:]} when "
                    "the module was wrapped: convert the module before you wrap it."
                )

    @property
    def names(self) -> list[str]:
        """Those of `parameters` when the module was wrapped."""
        return [self._names[id(parameter)] for parameter in self.parameters]

    def form(self, how: str, groups: Iterable[Sequence[Tensor]]) -> Form:
        """Of a reducer (FORM-1) that reduces the gradients of these `groups` of parameters one after the other. `how`:
        its options."""
        in_order = [(each, number) for number, group in enumerate(groups) for each in group]
        items = [
            (
                f"the gradient of {self._names[id(each)]}",
                f"number {place}, in bucket {number}, of {each.numel()} elements of {str(each.dtype)[6:]}",
            )
            for place, (each, number) in enumerate(in_order)
        ]
        return (("the reduction", how), *items)

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
