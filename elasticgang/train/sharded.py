"""Gradients of a sharded module, summed over the replica groups.

SHARDED-1  The module itself (`fully_shard`) reduces gradients within an sdp gang, during backward. After the last
    backward, this class sums each rank's part over the ranks that hold the same part.
SHARDED-2  Every rank reduces equally many bytes in the same order; a learner contributes zeros. So no rank waits for
    another's backward.
SHARDED-3  Backward may leave the gradient of a DTensor with other placements than the parameter has, such as the
    partial sums of a split embedding. They are redistributed before the sum, because an apply must not communicate.
SHARDED-4  Behind its parts, each rank sends which of them are gradients and not zeros. Where no rank has a gradient, it
    is None, and no optimizer changes the parameter.
SHARDED-5  With a dropped step, `fully_shard` forgets the gradients that it has not reduced. Otherwise the repeated step
    would add those of the slots once more.
SHARDED-6  With each step, also a committed one, `fully_shard` forgets a forward that no backward has followed, such as
    an evaluation: the order of the modules and the parameters that the root has gathered. Otherwise the ranks of an sdp
    gang, of which one may be new, would prefetch different modules, and the next forward would use parameters from
    before the update, or before the heal. The gradients of a committed step stay for its optimizer.
SHARDED-7  With `reduction="reproducible"` or `keep`, `fully_shard` reduces the gradients of each slot by themselves.
    Otherwise it would add those of several slots in an order of its own, or a slot would count as kept without them. In
    each case it has reduced all of them when the vote begins.
SHARDED-8  Nothing changes a gradient between the last backward and the vote: each replica group would clip its own sum
    by its own norm. Some elements of two gradients are compared, because the versions of DTensors do not count the
    changes of torch's foreach functions. `finish` waits for the device anyway. Nor does anything replace a gradient or
    drop it there.
SHARDED-9  No parameter lies along the replica groups, as on a mesh of `rdp` and `sdp` (HSDP): the module would add its
    gradients over them, and this class would add the sums once more.
SHARDED-10  Where `fully_shard` shards parameters over `sdp`, a warning names trainable ones that it leaves out, such as
    those beside the layers if only these were given to it: it does not add their gradients over the sdp gang, whose
    ranks would train each its own. An error would refuse a module that adds them by itself.
SHARDED-11  `fully_shard` reduces the gradients of all parameters that required one at construction in the same dtype,
    whatever is frozen in the first forward: in that of a rank that restarts, it may be a whole module.
SHARDED-12  What `fully_shard` exchanges in a step, in which order, is counted for the vote (AGREEMENT-4).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from elasticgang.collectives.work import Work
from elasticgang.errors import InvalidOperationError
from elasticgang.gang import Gangs, ReduceOperation
from elasticgang.member.manager import QuorumManager
from elasticgang.member.seat_state import along_replica_groups
from elasticgang.member.step import Step
from elasticgang.protocol.form import Form
from elasticgang.protocol.shortened import shortened
from elasticgang.state.dtensor import gradient_dtype, is_laid_out, like, local, local_gradient
from elasticgang.torch_private import forget_iteration, holds_gradients, init_dtypes_within, watch_exchanges
from elasticgang.train.kept_gradients import slot_gradients
from elasticgang.train.slot_gradients import check_reduction
from elasticgang.train.slot_sum import counts_of
from elasticgang.train.trainable import Trainable
from elasticgang.train.tree_reduce_scatter import TreeReduceScatter, check_is_sharded, check_layouts, install, unsharded

log = logging.getLogger("elasticgang")

_NUM_SAMPLED = 64  # elements
_NUM_NAMED = 3  # parameters in a warning


class ShardedDataParallel(nn.Module):
    """Wraps `module`, of which each rank of an sdp gang holds a part, and sums its gradients over `manager.gangs.rdp`.

    For FSDP2 modules, `fully_shard(module, mesh=manager.gangs.device_mesh("sdp"))`: they then reduce sums over `sdp`
    instead of means, and `Optimizer.step(weight=)` divides them. A warning names parameters that are left out of it,
    whose gradients nobody adds over `sdp`. `state_dict` is the module's.
    """

    def __init__(
        self, manager: QuorumManager, module: nn.Module, *, reduction: str = "sum", keep: bool = False
    ) -> None:
        """`reduction`, `keep`: as of `DistributedDataParallel`. "reproducible": the gradients of the slots are added in
        one order for every number of replica groups and every `sdp`, so that a job ends in the bits of one undisturbed
        rank with `sdp=1`. FSDP2 then exchanges gradients by an all-to-all. Ranks with `tp` or `pp` have other bits than
        without. `Optimizer.step` says which optimizers it refuses.

        Raises:
            ValueError: `reduction` is unknown. Or a parameter lies on a mesh along `rdp`, `dp` or `root`, as by a
                `fully_shard` without `mesh`: shard over `sdp`. Or `reduction` is "reproducible", and an `sdp` of the
                job's layouts is no power of two; or `sdp` is greater than 1, and `fully_shard` does not shard a
                trainable parameter over it. Or an embedding has sparse gradients, which no gang can sum.
        """
        super().__init__()
        check_reduction(reduction)
        if any(isinstance(each, DTensor) for each in module.parameters()):  # else there may be no generation yet
            _check_meshes(module, manager.gangs)
        self._options = f"reduction={reduction!r}, keep={keep}"
        self.is_reproducible = reduction == "reproducible"
        self._scatters: list[TreeReduceScatter] = []
        self._slot: tuple[Step, int | None] | None = None  # the last one of `accumulate`
        if self.is_reproducible:
            check_layouts(manager.layouts)
            if manager.layout.sdp > 1:
                check_is_sharded(module)
            self._scatters = install(module)
        self.module = module
        if manager.layout.sdp > 1 and self._fsdp_modules() and (left_out := unsharded(module)):  # SHARDED-10
            log.warning(
                "`fully_shard` does not shard %s, and adds no gradient of it over `sdp`: unless the module does so by "
                "itself, each rank trains its own; give the whole model to `fully_shard` too",
                shortened(left_out, _NUM_NAMED),
            )
        self._manager = manager
        self._parameters_in_order = list(module.parameters())
        self._trainable = Trainable(module)
        self._by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self._trainable.parameters:
            self._by_dtype.setdefault(gradient_dtype(parameter), []).append(parameter)
        self._sums: list[tuple[Tensor, list[nn.Parameter], Work]] = []
        self._buckets: dict[torch.dtype, Tensor] = {}  # DDP-5
        self._has_contributed = False
        self._final: list[tuple[nn.Parameter, Tensor]] = []  # the gradients after the last backward (SHARDED-8)
        self._sample: list[tuple[Tensor, Tensor]] = []  # of these, and some of their bytes
        self._changed: list[Tensor] = []  # whether they have changed since
        groups = list(self._by_dtype.values())
        self._of_slots = slot_gradients(manager, "rdp", module, groups, reduction, keep=keep)
        for part in self._fsdp_modules():
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            init_dtypes_within(part, self._trainable.required)  # SHARDED-11
        self._exchanges: tuple[Step | None, list[str]] = None, []  # SHARDED-12, of this step
        if manager.layout.sdp > 1:
            for name, part in module.named_modules():
                if any(map(_is_over_sdp, part.parameters())) and isinstance(part, FSDPModule):
                    watch_exchanges(part, name or "the whole module", self._has_exchanged)
        manager.add_reducer(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._of_slots is not None:
            self._of_slots.check_forward()
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        """Use it around forward and backward of one slot. `last`: the rank's last slot.

        Raises:
            InvalidOperationError: with `reduction="reproducible"` or `keep`, outside the loop over the slots of a
                `GlobalBatch`. Backward raises it with "reproducible" if `fully_shard` reduces gradients in another
                dtype than that of the parameters, or if `sdp` is greater than 1 and it reduces a parameter's gradient
                twice in a slot. With "reproducible" or `keep`, the end of the context raises it if `fully_shard` has
                not reduced the slot's gradients, because of `set_requires_gradient_sync(False)`. Or a parameter
                requires gradients that did not when the module was wrapped. `optim.step` raises it for both, and if
                the gradients were changed since the last backward. Or this rank has had no slots in an earlier loop of
                the step, outside of `torch.no_grad()`, and has reduced its zeros there.
            MismatchError: where ranks hold parts of the model, a restarted one trains other parameters (ALIKE-3).
        """
        step = self._manager.step
        step.check()
        step.check_gradients()
        self._trainable.check(dtypes=False)
        if self._of_slots is not None:
            self._of_slots.enter_slot()
        self._final, self._sample = [], []
        if self._slot is None or self._slot[0] is not step or self._slot[1] != step.slot:
            self._slot = step, step.slot
            for scatter in self._scatters:
                scatter.begin_slot()
        yield
        if self._of_slots is not None:
            self._check_reduced()
        if last and self._manager.step.share is not None:  # DRIVER-10
            self._note_final()

    def _note_final(self) -> None:
        """SHARDED-8. The last backward has ended."""
        self._sample = []
        self._final = [(each, grad) for each in self._trainable.parameters if (grad := each.grad) is not None]
        for gradients in (self._final, reversed(self._final)):
            for _, grad in gradients:
                if (found := some_bytes(grad)).numel():
                    self._sample.append((grad, found.clone()))
                    break

    def _check_final(self) -> None:
        """SHARDED-8. Raises InvalidOperationError: a gradient was dropped or replaced. One that is laid out anew is the
        same (SHARDED-3)."""
        if any(each.grad is not grad and is_laid_out(grad, each) for each, grad in self._final):
            raise _changed()

    def _check_reduced(self) -> None:
        """SHARDED-7. Raises InvalidOperationError."""
        if not any(map(holds_gradients, self._fsdp_modules())):
            return
        if self._of_slots is None:
            raise InvalidOperationError(
                "`fully_shard` has not reduced the gradients of this rank's slots: call "
                "`set_requires_gradient_sync(True)` before the forward of the last one."
            )
        raise InvalidOperationError(
            'with `reduction="reproducible"` or `keep=True`, `fully_shard` must reduce the gradients of each slot, '
            "but has not reduced those of the last one: leave out `set_requires_gradient_sync(False)`."
        )

    @property
    def form(self) -> Form:
        return self._trainable.form(f"{type(self).__name__}({self._options})", self._by_dtype.values())

    @property
    def order(self) -> Form:
        """(): it flattens every gradient in the order of its indices."""
        return ()

    @property
    def reduced(self) -> list[nn.Parameter]:
        return self._trainable.parameters

    @property
    def has_started(self) -> bool:
        return self._has_contributed

    def contribute(self) -> None:
        """SHARDED-1, SHARDED-2."""
        if self._has_contributed:
            return
        self._trainable.check(dtypes=self._of_slots is not None)
        self._check_reduced()
        self._check_final()
        self._has_contributed = True
        self._changed = [_differ(some_bytes(grad), bytes_then) for grad, bytes_then in self._sample]
        self._final, self._sample = [], []
        for index, (dtype, parameters) in enumerate(self._by_dtype.items()):
            if self._of_slots is not None:
                self._of_slots.reduce(index, [local_gradient(each) for each in parameters])  # SHARDED-3
                continue
            own = [local_gradient(parameter) for parameter in parameters]
            parts = [_part(each, parameter).flatten() for each, parameter in zip(own, parameters, strict=True)]
            parts.append(counts_of(own, dtype, parts[0].device))  # SHARDED-4
            flat = self._bucket(dtype, parts, gradient_dtype(parameters[0]))  # as on ranks without a gradient
            torch.cat(parts, out=flat)
            work = self._manager.reduction("rdp").all_reduce(flat, ReduceOperation.SUM, async_op=True)
            assert work is not None
            self._sums.append((flat, parameters, work))

    def _bucket(self, key: torch.dtype, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Memory for `parts` in `dtype`: that of the step before, unless one of them still lies in it."""
        device, num, bucket = parts[0].device, sum(map(Tensor.numel, parts)), self._buckets.get(key)
        if bucket is not None and (bucket.numel(), bucket.dtype) == (num, dtype):
            address = bucket.untyped_storage().data_ptr()
            if all(part.untyped_storage().data_ptr() != address for part in parts):
                return bucket
        bucket = self._buckets[key] = self._manager.empty(num, dtype, device)
        return bucket

    @property
    def has_all(self) -> bool:
        return True  # SHARDED-4

    @property
    def exchanged(self) -> Sequence[str]:
        step, exchanged = self._exchanges
        return exchanged if step is self._manager.step else ()

    def _has_exchanged(self, what: str) -> None:
        """SHARDED-12"""
        if self._exchanges[0] is not (step := self._manager.step):
            self._exchanges = step, []
        self._exchanges[1].append(what)

    def stages_of(self, parameter: Tensor) -> Sequence[int]:
        """(): no other stage has it."""
        return ()

    def leave_out_unused(self) -> None:
        """Does nothing: `finish` has."""

    def finish(self) -> None:
        if self._of_slots is not None:
            self._of_slots.finish()
        for flat, parameters, work in self._sums:
            work.wait()
            sizes = [local(parameter).numel() for parameter in parameters]
            *parts, counts = torch.split(flat, [*sizes, len(parameters)])
            for parameter, part, count in zip(parameters, parts, counts.tolist(), strict=True):
                parameter.grad = like(part.view(local(parameter).shape), parameter) if count else None
        self._sums, self._has_contributed = [], False
        self._forget_iteration()
        changed, self._changed = self._changed, []
        if any(map(bool, changed)):
            raise _changed()

    def _forget_iteration(self) -> None:
        """SHARDED-5, SHARDED-6."""
        for part in self._fsdp_modules():
            forget_iteration(part)

    def drop(self, *, rebuild: bool) -> None:
        for _, _, work in self._sums:
            work.wait()
        if self._of_slots is not None:
            self._of_slots.drop()
        self._sums, self._has_contributed, self._final, self._sample, self._changed = [], False, [], [], []
        for parameter in self._parameters_in_order:
            parameter.grad = None
        self._forget_iteration()

    def close(self) -> None:
        if self._of_slots is not None:
            self._of_slots.close()
        self._sums, self._parameters_in_order, self._slot, self._final, self._sample = [], [], None, [], []
        self._buckets.clear()

    def _fsdp_modules(self) -> list[FSDPModule]:
        return [part for part in self.module.modules() if isinstance(part, FSDPModule)]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)


def some_bytes(tensor: Tensor) -> Tensor:
    """Of the first elements of this rank's part of a dense tensor."""
    part = local(tensor)
    if part.is_sparse or not part.numel():
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return part.reshape(-1)[:_NUM_SAMPLED].resolve_conj().resolve_neg().contiguous().view(torch.uint8)


def _differ(now: Tensor, then: Tensor) -> Tensor:
    return (now != then).any() if now.shape == then.shape else torch.ones((), dtype=torch.bool)  # of another dtype


def _changed() -> InvalidOperationError:
    return InvalidOperationError(
        "the gradients were changed between the last backward and `optim.step`, which has yet to sum them over the "
        "replica groups: call `backward` inside `accumulate`; to clip gradients, give `optim.step` a `max_norm`; to "
        "leave out a loss, leave out its backward and its `weight`; to add those of stages that share a parameter, "
        "give `PipelineParallel` its name in `tied`."
    )


def _part(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    """This rank's part (SHARDED-3)."""
    return torch.zeros_like(local(parameter)) if gradient is None else gradient


def _is_over_sdp(parameter: Tensor) -> bool:
    """Not over a gang of the script's own, along which ranks may run different modules, as experts are."""
    return isinstance(parameter, DTensor) and "sdp" in (parameter.device_mesh.mesh_dim_names or ())


def _check_meshes(module: nn.Module, gangs: Gangs) -> None:
    """SHARDED-9. Raises ValueError."""
    for name, gang, _ in along_replica_groups(module, gangs):
        raise ValueError(
            f"the mesh of {name} must not lie along the replica groups, but does along `{gang}`: "
            "`ShardedDataParallel` adds the gradients over them. Give `fully_shard` the mesh "
            '`manager.gangs.device_mesh("sdp")`.'
        )
