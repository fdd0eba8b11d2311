"""An optimizer whose `step` is a vote.

A model's parameters may be DTensors on several meshes, together with plain tensors. torch has no operation over such a
mixture, so each gradient is divided and clipped in its local part.

OPTIMIZER-1  Where scaled gradients overflow on any rank, the step commits, no rank applies it, and all reduce the
    scale: the totals say so to all alike, before one votes.
OPTIMIZER-2  With `reduction="reproducible"` nothing that an apply does to an element depends on how ranks divide the
    parameters: the norm is of an exact sum (EXACT-1), and an optimizer that mixes elements is refused where a layout of
    the job divides them.
OPTIMIZER-3  The parameter groups stay those of the first step. A rank that starts later has the groups with which its
    script begins, and could not take the state of others.
OPTIMIZER-4  An apply begins with the same seeds of torch's generators on every rank: what an optimizer draws, and what
    the script draws after the step, does not depend on the slots that a rank has computed.
OPTIMIZER-5  The optimizer and all parameters that it trains are registered state: a rank that joins would lack others.
OPTIMIZER-6  A warning tells of a scaler by which losses are not multiplied, or gradients are not divided: optimizers
    such as AdamW hide the factor. An error would refuse a script that does one of both by itself.
OPTIMIZER-7  A warning names a number that the optimizer's first step changes and its state dict lacks, as a counter of
    steps: a rank that joins would begin with another one, and train otherwise than the others.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from elasticgang.errors import InvalidOperationError, NotSupportedError
from elasticgang.layout import MODEL_AXES
from elasticgang.member.manager import QuorumManager
from elasticgang.state.dtensor import is_first_replica, replicating_dims, stored
from elasticgang.state.optimizer_settings import settings_form
from elasticgang.torch_private import divide_all, has_scaled, multiply_all
from elasticgang.train import exact_square
from elasticgang.train.data import mixed, seed_generators
from elasticgang.train.loss_scale import next_state

log = logging.getLogger("elasticgang")

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_COMMUNICATING = frozenset({"PostLocalSGDOptimizer", "ZeroRedundancyOptimizer"})
_SCALER = torch.amp.GradScaler
_MIXING = frozenset({"Adafactor", "LBFGS", "Muon"})  # of torch.optim: what they do to an element depends on others


class Optimizer:
    """Wraps `optimizer`: all ranks apply a step, or none does. Several may take turns, in an order that follows from
    the step's index: one of them takes each step, and the gradients of the others are dropped with it.
    """

    _scalers: ClassVar[WeakSet[torch.amp.GradScaler]] = WeakSet()  # that optimizers have been given (OPTIMIZER-6)

    def __init__(
        self,
        manager: QuorumManager,
        optimizer: torch.optim.Optimizer,
        *,
        replicated: Mapping[str, Iterable[Tensor]] | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """`replicated`: for the gangs "tp", "sdp" and "pp", the parameters that are equal on all ranks of the gang. The
        gradient norm of the whole model counts them once. Do not list what a DTensor's own mesh replicates.
        `scaler`: by whose `scale` the losses are multiplied. `step` divides the gradients by it again. Where one
        overflows on any rank, the step commits, no rank applies it, and the scale falls on all. Register the scaler as
        training state, and call nothing of it but `scale`.

        Raises:
            ValueError: `replicated` names another gang; or there is a scaler, and a parameter is float16: keep float32
                parameters, and compute under `torch.autocast`.
            NotSupportedError: a step of `optimizer` communicates, so that a death could leave it applied on some ranks
                only (RULE-10); or it needs a closure, as that of torch's LBFGS, which computes the loss again; or
                `optimizer` has others as attributes, and does not say by methods of its own what their state is.
        """
        _refuse_communicating(optimizer)
        _refuse_closure(optimizer)
        _refuse_inner(optimizer)
        self.optim = optimizer
        self.sums: dict[str, float] = {}
        """The sums over all ranks that the last `step` was asked for, by name; empty unless it has returned True."""
        self._manager = manager
        self._has_checked = False  # `_check_elementwise`
        self._is_known = False  # `_check_registered`
        self._has_applied = False  # OPTIMIZER-7
        self._groups: list[list[Tensor]] | None = None  # as of the first step (OPTIMIZER-3)
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._scaler_is_known = False  # `_check_scaled`
        if scaler is not None:
            self._scalers.add(scaler)
        if self._scaler is not None and any(each.dtype is torch.float16 for each in self._parameters()):
            raise ValueError(
                "`optimizer` must have no float16 parameters where gradients are scaled: keep float32 parameters, and "
                "compute under `torch.autocast`."
            )
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

    def step(
        self,
        *,
        weight: float,
        max_norm: float | None = None,
        sums: Mapping[str, float | Tensor] | None = None,
    ) -> bool:
        """Vote on the step and apply it if it is committed: divide the gradients by the sum of all ranks' `weight`,
        clip them to `max_norm` if given (the 2-norm over all parameters of the model, on all ranks), apply them, and
        set them to None.

        `weight`: the number of samples or tokens that this rank's losses were summed over; 0 without slots. With `tp`
        or `pp`, all ranks that count the same samples give the same, also the stages that know no loss.
        `sums`: numbers of this rank, or tensors of one element, under the same names on every rank. They are summed
        over all ranks together with the weights, in float64. Once the step is committed, the attribute `sums` has the
        sums: `optim.sums["loss"]`. All ranks that apply the step have the same ones, whoever has died since. A rank
        that heals adds zeros. With `tp` or `pp`, several ranks know the same loss: give it on one of them, and 0 on the
        others.

        Returns True if the step is committed and in this rank's state. Returns False if it is dropped; it is then tried
        again with the same samples. Blocks until that is decided, possibly through a generation change.

        Raises:
            ValueError: `weight` is negative or not finite, or a value of `sums` has several elements. Nothing was sent.
            LayoutError: no stage of the pipeline has a part of the state that the stages of another one had. Nothing is
                committed.
            InvalidOperationError: called outside `with step:`, or twice in it; or the weights of all ranks sum to 0, or
                those of ranks along `tp` or `pp` differ; or `sums` has other names on some ranks, equally many; or
                ranks take their slots from different `GlobalBatch`es; or the loop over the slots of a `StreamLoader`
                was left early; or the scaler is not registered; or the parameter groups have changed since the first
                step; or the optimizer, or a parameter that it trains, is not registered; or the step has changed a
                parameter; or, without `pp`, ranks have different learning rates.
            MismatchError: this rank has joined, and its learning rate, or another setting, is not that of the others.
                The agent does not restart it.
            NotSupportedError: with `reduction="reproducible"`, where a layout of the job has `sdp`: the optimizer is
                torch's Adafactor, LBFGS or Muon, whose result for an element depends on others; or parameters on the
                CPU are float16 or bfloat16, or its `fused` form is chosen for them, because these round the last
                elements of a part otherwise than the ones before.
        """
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"`weight` must be finite and at least 0, but is {weight} instead.")
        if self._scaler is not None and not self._manager.is_registered(self._scaler):
            raise InvalidOperationError(
                "register the scaler of the gradients before the first step, so that a rank that joins gets its scale: "
                "`register_state(scaler=scaler)`"
            )
        self._check_groups()
        self._check_registered()
        self._check_elementwise()
        if weight > 0:
            self._check_scaled()
        is_exact = self._manager.is_reproducible and not self._has_own_meshes()
        measures: Callable[[], list[float]] | None = None
        if max_norm is not None and (is_exact or self._manager.layout.unit > 1):
            measures = self._exact_squares if is_exact else self._squares
        step = self._manager.step
        seed = mixed(*sorted(step.seeds), step.index) if step.seeds else None
        # None as long as this rank has had no slots, in the loop over which a script may set it (ALIKE-2). Read here: a
        # peer asks for the settings while all parameters may have to require gradients for a moment (TRAINABLE-1).
        required = None
        if weight > 0:
            required = [[each.requires_grad for each in group["params"]] for group in self.param_groups]
        names = sorted(sums or {})
        numbers = [_number(name, (sums or {})[name]) for name in names]
        self.sums = {}
        is_committed = self._manager.commit(
            float(weight),
            lambda total, *measured: self._apply(seed, overflows=_overflows(measured)),
            functools.partial(self._measure, measures) if measures is not None or self._scaler is not None else None,
            prepare=lambda total, *measured: self._make_ready(total, max_norm, measured, is_exact=is_exact),
            numbers=numbers,
            names=zlib.crc32("\0".join(names).encode()),
            settings=functools.partial(settings_form, self.optim, max_norm, required),
            rates=self._rates(),
        )
        self.sums = dict(zip(names, self._manager.step.sums, strict=True)) if is_committed else {}
        return is_committed

    def _rates(self) -> float:
        """A number that stands for the learning rates of the groups (AGREEMENT-2), without those on a device."""
        rates = (_rate(group.get("lr")) for group in self.param_groups)
        total = sum(rate * (number + 1) for number, rate in enumerate(rates))
        return total if math.isfinite(total) else 0.0

    def _measure(self, measures: Callable[[], list[float]] | None) -> list[float]:
        """OPTIMIZER-1: whether a gradient of this rank overflows, if there is a scaler; and what `measures` returns."""
        overflows = self._scaler is not None and not self._is_finite()
        squares = measures() if measures is not None else []
        return [float(overflows), *([0.0] * len(squares) if overflows else squares)]

    def _is_finite(self) -> bool:
        parts = [
            part for gradient in self._gradients() if (part := stored(gradient)).numel()
        ]  # no norm of an empty one
        return not parts or bool(torch.nn.utils.get_total_norm(parts, math.inf).isfinite())

    def _make_ready(self, total: float, max_norm: float | None, measured: Sequence[float], *, is_exact: bool) -> None:
        """Divide and clip the gradients. `measured`: as of `_measure`, summed over all ranks."""
        if _overflows(measured):
            return
        divisor = total if self._scaler is None else total * self._scaler.get_scale()
        by_kind: dict[Any, list[Tensor]] = defaultdict(list)
        for gradient in self._gradients():
            part = stored(gradient)
            by_kind[part.device, part.dtype].append(part)
        for parts in by_kind.values():
            divide_all(parts, divisor)
        if max_norm is None:
            return
        if squares := measured[1:]:
            root = exact_square.root_of(squares) if is_exact else math.sqrt(math.fsum(squares))
            whole = torch.tensor(root / divisor, dtype=torch.float64, device="cpu")
        else:
            whole = self._norm_here()
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

    def _apply(self, seed: int | None, *, overflows: bool) -> None:
        if seed is not None:  # OPTIMIZER-4; without slots the script seeds the generators
            seed_generators(seed)
        if not overflows:
            self._split_mixed_lists()
            before = None if self._has_applied else _unsaved(self.optim)
            self.optim.step()
            if before is not None:
                self._has_applied = True
                _warn_of_unsaved(before, _unsaved(self.optim))
        self.optim.zero_grad(set_to_none=True)
        if self._scaler is not None:
            self._scaler.load_state_dict(next_state(self._scaler.state_dict(), overflows=overflows))

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

    def _exact_squares(self) -> list[float]:
        """As `_squares`, in numbers that are added exactly (OPTIMIZER-2). So the replica groups with slots divide the
        elements, which all of them have."""
        share = self._manager.step.share
        if share is None:
            return exact_square.numbers_of(())
        group, num_groups = share.index // share.group_size, share.count // share.group_size
        counted = [each.grad for each in self._parameters() if self._is_counted(each)]
        parts = [stored(grad, summed=True).reshape(-1) for grad in counted if grad is not None]
        return exact_square.numbers_of(
            part[part.numel() * group // num_groups : part.numel() * (group + 1) // num_groups] for part in parts
        )

    def _is_counted(self, parameter: Tensor) -> bool:
        """Whether this rank is the first one of those that have the same elements of the parameter's gradient."""
        named = self._axes_alike.get(parameter, set()) - {name for name, _ in replicating_dims(parameter.grad)}
        gangs, stages = self._manager.gangs, self._manager.stages_of(parameter)
        first = dict.fromkeys(named, 0) | ({"pp": stages[0]} if stages else {})
        return is_first_replica(parameter.grad) and all(
            getattr(gangs, axis).rank == rank for axis, rank in first.items()
        )

    def _has_own_meshes(self) -> bool:
        """Whether a parameter is divided along a mesh of the script, in a layout that divides none."""
        return self._manager.layout.unit == 1 and any(
            isinstance(each, DTensor) and each.device_mesh.size() > 1 for each in self._parameters()
        )

    def _check_groups(self) -> None:
        """OPTIMIZER-3. Raises InvalidOperationError."""
        present = [list(group["params"]) for group in self.param_groups]
        first = self._groups = self._groups or present
        if [list(map(id, group)) for group in present] != [list(map(id, group)) for group in first]:
            before, now = ([len(group) for group in each] for each in (first, present))
            what = "others" if now == before else f"{now}"
            raise InvalidOperationError(
                f"the optimizer's parameter groups must stay as they were in the first step, with {before} parameters, "
                f"but have {what} now: a rank that starts later could not heal. Give it all groups "
                "before the first step, and let parameters that it is to train later not require gradients until then."
            )

    def _check_registered(self) -> None:
        """OPTIMIZER-5. Raises InvalidOperationError."""
        if self._is_known:
            return
        if not (self._manager.is_registered(self) or self._manager.is_registered(self.optim)):
            raise InvalidOperationError(
                "register the optimizer before the first step, so that a rank that joins gets its state: "
                "`register_state(optim=optim)`"
            )
        trained = [each for each in self._parameters() if each.requires_grad]
        if left := self._manager.objects.without(trained):
            raise InvalidOperationError(
                f"{_what(trained, left)} in no module that is registered, so that a rank that joins would not get "
                f"{'it' if len(left) == 1 else 'them'}: give `register_state` the module, or "
                "`torch.nn.ParameterList([...])` of them"
            )
        if left := self._manager.unreduced(trained):
            log.warning(
                "%s in no wrapped module, as it was when it was wrapped: the ranks do not sum the gradients, unless "
                "the script does so itself. Wrap one module that has all parameters, by `eg.DistributedDataParallel`.",
                _what(trained, left),
            )
        self._is_known = True

    def _check_scaled(self) -> None:
        """OPTIMIZER-6. This rank has had slots."""
        if self._scaler_is_known:
            return
        self._scaler_is_known, manager = True, self._manager
        if self._scaler is not None:
            if manager.layout.pp == 1 and not has_scaled(self._scaler):  # the last stage alone knows the losses
                log.warning(
                    "the scaler has scaled no loss, but the gradients are divided by its scale: call "
                    "`scaler.scale(loss).backward()`, unless the script multiplies the losses by the scale itself"
                )
        elif any(has_scaled(each) and each not in self._scalers for each in manager.objects.of_class(_SCALER)):
            log.warning(
                "a registered scaler has scaled losses, but no optimizer divides the gradients by its scale: give it "
                "to `eg.Optimizer(manager, optimizer, scaler=scaler)`"
            )

    def _check_elementwise(self) -> None:
        """OPTIMIZER-2. Raises NotSupportedError."""
        if self._has_checked or not self._manager.is_reproducible:
            return
        self._has_checked = True
        divided = [each for each in self._parameters() if isinstance(each, DTensor) and each.requires_grad]
        if not divided or all(layout.sdp == 1 for layout in self._manager.layouts):
            return
        start = 'with `reduction="reproducible"` and `sdp`, '
        for kind in type(self.optim).__mro__:
            if kind.__name__ in _MIXING and f"{kind.__module__}.".startswith("torch.optim."):
                raise NotSupportedError(
                    f"{start}`optimizer` must treat each element of a parameter by itself, but {kind.__name__} does "
                    "not: its result would depend on `sdp`. Use one such as SGD or AdamW."
                )
        if all(each.device.type != "cpu" for each in divided):
            return
        if any(group.get("fused") for group in self.param_groups):
            raise NotSupportedError(
                f"{start}an optimizer on the CPU must not have `fused=True`, which rounds the last elements of a part "
                "otherwise than those before: its result would depend on `sdp`."
            )
        if any(each.dtype in (torch.float16, torch.bfloat16) for each in divided):
            raise NotSupportedError(
                f"{start}parameters on the CPU must not be float16 or bfloat16, of which an optimizer rounds the last "
                "elements of a part otherwise than those before: its result would depend on `sdp`. Keep float32 "
                "parameters, and compute in bfloat16 by `MixedPrecisionPolicy(param_dtype=, reduce_dtype=)`."
            )

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
        by_axis: dict[str, int] = {axis: getattr(self._manager.layout, axis) for axis in named}
        if stages := self._manager.stages_of(parameter):
            by_axis["pp"] = len(stages)
        return math.prod([size for _, size in known] + list(by_axis.values()))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Call the wrapped optimizer's. A committed `step` does this by itself."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load it into the wrapped optimizer. Its state until then is freed first, so that there is one copy of it."""
        self.optim.state.clear()
        self.optim.load_state_dict(state_dict)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optim.param_groups for parameter in group["params"]]

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters() if parameter.grad is not None]


def _number(name: str, value: float | Tensor) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"`sums[{name!r}]` must have one element, but has the shape {tuple(value.shape)} instead.")
    return float(value.detach() if isinstance(value, Tensor) else value)


def _rate(setting: object) -> float:
    """A learning rate; 0 if `setting` is none, or on a device."""
    if isinstance(setting, Tensor):
        return setting.item() if setting.numel() == 1 and setting.device.type == "cpu" else 0.0
    return float(setting) if isinstance(setting, int | float) else 0.0


def _what(parameters: Sequence[Tensor], numbers: Sequence[int]) -> str:
    """Those of `parameters` with these numbers, in words."""
    shape = list(parameters[numbers[0]].shape)
    if len(numbers) == 1:
        return f"a parameter of the optimizer, of the shape {shape}, is"
    return f"{len(numbers)} parameters of the optimizer, the first of the shape {shape}, are"


def _overflows(measured: Sequence[float]) -> bool:
    return bool(measured) and measured[0] > 0


def _refuse_communicating(optimizer: torch.optim.Optimizer) -> None:
    """RULE-10: nothing inside an apply communicates."""
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _COMMUNICATING and kind.__module__.startswith("torch.distributed."):
            raise NotSupportedError(
                f"`optimizer` must not communicate in its step, but {kind.__name__} does: a rank that dies there would "
                "leave the step applied on some ranks only. Use an optimizer of torch.optim; to shard its state, "
                "declare `ParallelLayout(sdp=...)` and use `fully_shard`."
            )


def _saves_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    kind, plain = type(optimizer), torch.optim.Optimizer
    return kind.state_dict is not plain.state_dict and kind.load_state_dict is not plain.load_state_dict


def _unsaved(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """OPTIMIZER-7: the numbers that it has as attributes, unless it saves by methods of its own."""
    if _saves_by_itself(optimizer):
        return {}
    return {name: value for name, value in vars(optimizer).items() if type(value) in (int, float)}


def _warn_of_unsaved(before: Mapping[str, float], after: Mapping[str, float]) -> None:
    """OPTIMIZER-7"""
    if changed := [name for name, value in after.items() if before.get(name) != value]:
        log.warning(
            "the state dict of the optimizer lacks `%s`, which its step changes: a rank that starts later begins with "
            "another value, and may train otherwise than the others. Keep it in `state` or `param_groups`, or give the "
            "class `state_dict` and `load_state_dict`",
            "`, `".join(changed),
        )


def _refuse_inner(optimizer: torch.optim.Optimizer) -> None:
    """What torch's methods save and load is the state of `optimizer` alone."""
    kind, plain = type(optimizer), torch.optim.Optimizer
    if _saves_by_itself(optimizer):
        return
    for name, value in vars(optimizer).items():
        held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(each, plain) for each in held):
            raise NotSupportedError(
                f"`optimizer` must save what it keeps, but {kind.__name__} has other optimizers in `{name}`, and "
                "torch's `state_dict` and `load_state_dict`, which leave out their state: a rank that joins would not "
                "get it. Give the class both methods; the state dict has all of `state` and `param_groups`."
            )


def _refuse_closure(optimizer: torch.optim.Optimizer) -> None:
    """An apply has no loss that it could compute again."""
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()  # a schedule replaces the bound one
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.kind not in _VARIABLE:
            raise NotSupportedError(
                f"`optimizer` must have a step without arguments, but that of {type(optimizer).__name__} needs "
                f"`{parameter.name}`. Use one such as SGD or AdamW."
            )
