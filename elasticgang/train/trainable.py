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
        """Raises ValueError: an embedding has sparse gradients, which no gang can sum."""
        for name, each in module.named_modules():
            if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse and each.weight.requires_grad:
                raise ValueError(f"the gradients of `module` must be dense, but {name or 'it'} has `sparse=True`.")
        found = dict(module.named_parameters())
        self._others = {name: each for name, each in found.items() if not each.requires_grad}
        self.names = [name for name in found if name not in self._others]
        self.parameters = [found[name] for name in self.names]
        self._dtypes = [parameter.dtype for parameter in self.parameters]

    def check(self, *, dtypes: bool) -> None:
        """Raises InvalidOperationError: another parameter requires gradients now; or, with `dtypes`, one of these has
        another dtype than the memory for its gradient."""
        for name, parameter in self._others.items():
            if parameter.requires_grad:
                raise InvalidOperationError(
                    f"{name} requires gradients now, but did not when the module was wrapped: the ranks do not reduce "
                    "its gradient. Wrap the module while all parameters to be trained require gradients, and freeze "
                    "them by `requires_grad_(False)` afterwards."
                )
        if dtypes and (present := [parameter.dtype for parameter in self.parameters]) != self._dtypes:
            pairs = zip(self.names, present, self._dtypes, strict=True)
            name, now, then = next(each for each in pairs if each[1] is not each[2])
            raise InvalidOperationError(
                f"{name} is {str(now)[6:]} now, but was {str(then)[6:]} when the module was wrapped: convert the "
                "module before you wrap it."
            )

    def form(self, how: str, groups: Iterable[Sequence[Tensor]]) -> Form:
        """Of a reducer (FORM-1) that reduces the gradients of these `groups` of parameters one after the other. `how`:
        its options."""
        names: dict[Tensor, str] = dict(zip(self.parameters, self.names, strict=True))
        in_order = [(names[each], each, number) for number, group in enumerate(groups) for each in group]
        items = [
            (
                f"the gradient of {name}",
                f"number {place}, in bucket {number}, of {each.numel()} elements of {str(each.dtype)[6:]}",
            )
            for place, (name, each, number) in enumerate(in_order)
        ]
        return (("the reduction", how), *items)

    @property
    def strides(self) -> list[tuple[int, ...]]:
        """Of each of `parameters`, as it lies in memory now."""
        return [parameter.stride() for parameter in self.parameters]

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
