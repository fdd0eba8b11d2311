"""An optimizer whose `step` is a vote.

A model's parameters may be DTensors on several meshes, together with plain tensors. torch has no operation over such a
mixture, so each gradient is divided and clipped in its local part.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from elasticgang.errors import NotSupportedError
from elasticgang.layout import MODEL_AXES
from elasticgang.member.manager import QuorumManager
from elasticgang.state.dtensor import replicating_dims, stored
from elasticgang.torch_private import divide_all, multiply_all

log = logging.getLogger("elasticgang")

_COMMUNICATING = frozenset({"PostLocalSGDOptimizer", "ZeroRedundancyOptimizer"})


class Optimizer:
    """Wraps `optimizer`: all ranks apply a step, or none does. A manager has one."""

    def __init__(
        self,
        manager: QuorumManager,
        optimizer: torch.optim.Optimizer,
        *,
        replicated: Mapping[str, Iterable[Tensor]] | None = None,
    ) -> None:
        """`replicated`: for the gangs "tp", "sdp" and "pp", the parameters that are equal on all ranks of the gang. The
        gradient norm of the whole model counts them once. Do not list what a DTensor's own mesh replicates.

        Raises:
            ValueError: `replicated` names another gang.
            NotSupportedError: a step of `optimizer` communicates, so that a death could leave it applied on some ranks
                only (RULE-10).
        """
        _refuse_communicating(optimizer)
        self.optim = optimizer
        self._manager = manager
        self._axes_alike: dict[Tensor, set[str]] = defaultdict(set)
        for axis, parameters in (replicated or {}).items():
            if axis not in MODEL_AXES:
                raise ValueError(f"`replicated` must name some of {', '.join(MODEL_AXES)}, but names {axis!r} instead.")
            for parameter in parameters:
                self._axes_alike[parameter].add(axis)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.optim.param_groups
        return groups

    def step(self, *, weight: float, max_norm: float | None = None) -> bool:
        """Vote on the step and apply it if it is committed: divide the gradients by the sum of all ranks' `weight`,
        clip them to `max_norm` if given (the 2-norm over all parameters of the model, on all ranks), apply them, and
        set them to None.

        `weight`: the number of samples or tokens that this rank's losses were summed over; 0 without slots.

        Returns True if the step is committed and in this rank's state. Returns False if it is dropped; it is then tried
        again with the same samples. Blocks until that is decided, possibly through a generation change.

        Raises:
            ValueError: `weight` is negative or not finite. Nothing was sent.
            InvalidOperationError: called outside `with step:`, or twice in it; or the weights of all ranks sum to 0.
        """
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"`weight` must be finite and at least 0, but is {weight} instead.")
        if max_norm is None or self._manager.layout.unit == 1:
            return self._manager.commit(
                float(weight), lambda total: self._apply(), prepare=lambda total: self._make_ready(total, max_norm)
            )
        return self._manager.commit(
            float(weight),
            lambda total, *squares: self._apply(),
            self._squares,
            prepare=lambda total, *squares: self._make_ready(total, max_norm, math.sqrt(math.fsum(squares)) / total),
        )

    def _make_ready(self, total: float, max_norm: float | None, norm: float | None = None) -> None:
        """Divide and clip the gradients. `norm`: the norm of the whole model's gradient; None: compute it here."""
        by_kind: dict[Any, list[Tensor]] = defaultdict(list)
        for gradient in self._gradients():
            part = stored(gradient)
            by_kind[part.device, part.dtype].append(part)
        for parts in by_kind.values():
            divide_all(parts, total)
        if max_norm is None:
            return
        whole = self._norm_here() if norm is None else torch.tensor(norm, dtype=torch.float64)
        coefficient = torch.clamp(max_norm / (whole + 1e-6), max=1.0)
        for (device, _), parts in by_kind.items():
            multiply_all(parts, coefficient.to(device))

    def _norm_here(self) -> Tensor:
        """The norm of all gradients, for a layout that does not divide the model among ranks."""
        by_mesh: dict[Any, list[Tensor]] = defaultdict(list)
        for gradient in self._gradients():
            if isinstance(gradient, DTensor) and gradient.device_mesh.size() > 1:
                by_mesh[gradient.device_mesh].append(gradient)
            else:
                by_mesh[None].append(stored(gradient, summed=True))
        norms = [torch.nn.utils.get_total_norm(of_mesh) for of_mesh in by_mesh.values()]
        plain = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        return plain[0] if len(plain) == 1 else torch.nn.utils.get_total_norm(plain)

    def _apply(self) -> None:
        self._split_mixed_lists()
        self.optim.step()
        self.optim.zero_grad(set_to_none=True)

    def _split_mixed_lists(self) -> None:
        """Turn off `foreach` and `fused` in parameter groups that mix plain tensors and DTensors: these forms, which
        `None` may select, raise for such a list in the middle of an apply."""
        for index, group in enumerate(self.optim.param_groups):
            asked = [form for form in ("foreach", "fused") if group.get(form)]
            may_choose = "foreach" in group and group["foreach"] is None
            if not (asked or may_choose) or len({isinstance(each, DTensor) for each in group["params"]}) < 2:
                continue
            group.update({form: False for form in ("foreach", "fused") if form in group})
            if asked:
                forms = " and ".join(f"`{form}`" for form in asked)
                log.warning("parameter group %d has plain tensors beside DTensors: %s is turned off", index, forms)

    def _squares(self) -> list[float]:
        """The squared gradient norm by model coordinates. Each rank of the first replica group with slots measures its
        part, the others none, so that no sum over ranks is rounded. Elements that several ranks have count once."""
        layout, gangs, share = self._manager.layout, self._manager.gangs, self._manager.step.share
        squares = [0.0] * layout.unit
        if share is not None and share.index < share.group_size:
            squares[(gangs.pp.rank * layout.sdp + gangs.sdp.rank) * layout.tp + gangs.tp.rank] = self._square()
        return squares

    def _square(self) -> float:
        """The part of the squared norm for which this rank's model coordinates stand."""
        square = 0.0
        for parameter in self._parameters():
            if parameter.grad is not None:
                part = stored(parameter.grad, summed=True)
                own = float((torch.view_as_real(part) if part.is_complex() else part).to(torch.float64).square().sum())
                square += own / self._num_alike(parameter)
        return square

    def _num_alike(self, parameter: Tensor) -> int:
        """The number of ranks that have the same elements of the parameter's gradient."""
        known = replicating_dims(parameter.grad)
        named = self._axes_alike.get(parameter, set()) - {name for name, _ in known}
        sizes: list[int] = [size for _, size in known] + [getattr(self._manager.layout, axis) for axis in named]
        return math.prod(sizes)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Call the wrapped optimizer's. A committed `step` does this by itself."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load it into the wrapped optimizer."""
        self.optim.load_state_dict(state_dict)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optim.param_groups for parameter in group["params"]]

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters() if parameter.grad is not None]


def _refuse_communicating(optimizer: torch.optim.Optimizer) -> None:
    """RULE-10: nothing inside an apply communicates."""
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _COMMUNICATING and kind.__module__.startswith("torch.distributed."):
            raise NotSupportedError(
                f"`optimizer` must not communicate in its step, but {kind.__name__} does: a rank that dies there would "
                "leave the step applied on some ranks only. Use an optimizer of torch.optim; to shard its state, "
                "declare `ParallelLayout(sdp=...)` and use `fully_shard`."
            )
