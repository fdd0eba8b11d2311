"""Data-parallel gradients: torch's DistributedDataParallel, with its buckets reduced over the gang.

DDP-1  Construction communicates nothing, so that a newcomer builds its model while the others train.
DDP-2  Construction fixes the buckets, in the order in which backward is likely to fill them. Otherwise torch rebuilds
    them after the first backward, and a newcomer's would differ from those of the other ranks.
DDP-3  The communication hook never raises and its future never fails: an exception inside backward breaks DDP's next
    step.
DDP-4  The hook never waits: its future is complete at once, with the bucket, and `finish` waits for the reductions.
    Until then a gradient is this rank's own or partly reduced.
DDP-5  The buckets lie in memory that the comm process shares, from their construction on (`QuorumManager.empty`). They
    stay there in every generation, whatever happens to comm processes.
DDP-6  Only a forward inside `accumulate` prepares torch's reducer. It would stay prepared after any other one, and the
    backward of the first slot would then reduce.
DDP-7  Nothing changes a gradient whose reduction has begun: the sum over the ranks would lack what is added, and the
    ranks would differ. Backward then raises, or `accumulate` does. The version of a bucket counts the changes, and that
    of a gradient where the last backward has not filled its bucket: the reduction begins with the vote there. Nor does
    anything replace a gradient or drop it, which would change nothing.
DDP-8  A gradient that no rank has is None, and no optimizer changes its parameter. The totals tell whether any rank
    has all gradients. Only if none has, the ranks sum for each parameter how many of them have its gradient. The sums
    of slots count that themselves (SUM-3).
DDP-9  A gradient lies in its bucket in the order in which its parameter lies in memory, a complex one as pairs of real
    numbers. `GradBucket.gradients` takes every parameter to be contiguous and real, and is not used.
DDP-10  The wrappers of a rank reduce in the order in which they were made, because a rank without slots does. If the
    backward of one comes before that of an earlier one, its buckets wait for the vote.
DDP-11  Where parameters lie in memory in another order than when the buckets were cut, as after `to(memory_format=)`,
    every rank cuts them anew before the first forward of a step. Otherwise only a rank that an exception has made do
    so would have the new order, and the ranks would add the gradients of different elements. So they would if the order
    changed later in a step, as ranks without slots have no forward: that is an error. ALIKE-2 compares the order.
"""

# No `from __future__ import annotations` here: torch compares the annotations of communication hooks with its classes.

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torchft.process_group import ProcessGroupDummy

from elasticgang.collectives.work import Work
from elasticgang.errors import InvalidOperationError
from elasticgang.gang import ReduceOperation
from elasticgang.member.manager import QuorumManager
from elasticgang.protocol.form import Form
from elasticgang.torch_private import AllocatesVectors, rebuild_buckets, zeroed_buckets
from elasticgang.train.kept_gradients import slot_gradients
from elasticgang.train.slot_gradients import check_reduction
from elasticgang.train.slot_sum import counts_of
from elasticgang.train.trainable import Trainable

log = logging.getLogger("elasticgang")


@dataclass(frozen=True)
class _Place:
    """Where the gradient of a parameter lies in its bucket. `start`: its first element, of the bucket's dtype."""

    shape: torch.Size
    stride: tuple[int, ...]
    start: int
    is_complex: bool

    @property
    def is_contiguous(self) -> bool:
        return self.stride == torch.empty(self.shape, device="meta").stride()

    def of(self, buffer: Tensor) -> Tensor:
        first = buffer.storage_offset() + self.start
        if not self.is_complex:
            return buffer.as_strided(self.shape, self.stride, first)
        pairs = torch.view_as_complex(buffer.as_strided((self.shape.numel(), 2), (2, 1), first))
        return pairs.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class _Reduced:
    """A bucket that backward has filled. `version`: of `buffer` at that time. `own`: the gradients of this rank."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    own: list[Tensor | None]
    buffer: Tensor
    version: int


class _FixedBuckets(nn.parallel.DistributedDataParallel):
    """DDP-2. With `find_unused_parameters` torch cuts the buckets at construction. Without it, torch would cut them at
    the first backward, so `fix` does it. They have the parameters of `trainable`, whatever `module` has now
    (TRAINABLE-1)."""

    def __init__(self, module: nn.Module, trainable: Trainable, **options: Any) -> None:
        self._named = dict(zip(trainable.parameters, trainable.names, strict=True))
        super().__init__(module, **options)

    def _build_params_for_reducer(self) -> Any:
        super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        parameters = list(self._named)
        return parameters if self.find_unused_parameters else parameters[::-1], [False] * len(parameters)

    def _build_debug_param_to_name_mapping(self, parameters: Any) -> dict[int, str]:
        return {number: self._named[parameter] for number, parameter in enumerate(parameters)}

    def fix(self, empty: Callable[[int, torch.dtype], Tensor]) -> list[list[Tensor]]:
        """Cut the buckets now, in memory of `empty`. Returns the parameters of each."""
        with AllocatesVectors(empty):
            rebuild_buckets(self.reducer)
        return [bucket.parameters() for bucket in zeroed_buckets(self.reducer)]


class DistributedDataParallel(nn.Module):
    """Wraps `module` and sums its gradients over `manager.gangs.dp`. With `over="rdp"` it sums over the replica groups
    only, for a module of which each rank of an `sdp` gang holds a part.

    Gradients are sums, not means: `Optimizer.step(weight=)` divides them by the total weight. Backward must run inside
    `accumulate`. The one with `last=True` starts the reduction, and `Optimizer.step` waits for it: do not read the
    gradients in between. Outside `accumulate` the model can be evaluated; with `reduction="reproducible"` or `keep`,
    only inside `torch.no_grad()`. `state_dict` is the module's. `copy.deepcopy` copies
    the module without the wrapper, as torch's `AveragedModel` needs it.
    """

    def __init__(
        self,
        manager: QuorumManager,
        module: nn.Module,
        *,
        over: str = "dp",
        reduction: str = "sum",
        keep: bool = False,
        bucket_cap_mb: float = 25.0,
        find_unused_parameters: bool = False,
    ) -> None:
        """`reduction`: "sum", or "reproducible": the sum of the slots' gradients is the same, bit for bit, for every
        number of ranks and every division of the slots of a `GlobalBatch`. It costs memory for some more copies of the
        gradients, and the time to add each slot's (see docs/design.md). Each slot's own gradient must then be the same
        on every rank: the same number of threads, the same kernels, and no buffers that forward changes. So must the
        sum of `weight`, as that of whole numbers is.

        `keep`: when a rank dies in the middle of a step, the replica groups that are whole keep the gradients of their
        finished slots, and compute only those that are missing. Each rank keeps its own part of them. It costs memory
        for more copies of the gradients (see docs/design.md), and the time to add each slot's. In a step that is tried
        again, the loop over the slots leaves out those in `slots.kept`. What the script adds up in the loop must count
        them too, `weight` above all: `slots.num_samples` does. If a slot changes buffers of the module, nothing is
        kept.

        `find_unused_parameters`: in each forward, look for parameters that backward does not reach. Without it, a step
        in which the last backward leaves out parameters takes longer: torch's wrapper is rebuilt. With both this and
        `keep` or `reduction="reproducible"`, the reduction starts after the last backward, not within it. With or
        without it, a parameter that no slot's backward has reached has no gradient, and `optim.step` does not change
        it.

        Raises:
            ValueError: `over` is neither "dp" nor "rdp", `reduction` is unknown, a parameter is a DTensor, which
                torch's reducer does not accept, or requires gradients and is in another wrapper too, or an embedding
                has sparse gradients, which no gang can sum.
        """
        super().__init__()
        if over not in ("dp", "rdp"):
            raise ValueError(f'`over` must be "dp" or "rdp", but is {over!r} instead.')
        check_reduction(reduction)
        for name, parameter in module.named_parameters():
            if isinstance(parameter, DTensor):
                raise ValueError(
                    f"the parameters of `module` must be plain tensors, but {name} is a DTensor; use "
                    "`ShardedDataParallel`."
                )
        self._over = over
        self._options = (
            f"over={over!r}, reduction={reduction!r}, keep={keep}, find_unused_parameters={find_unused_parameters}"
        )
        self.is_reproducible = reduction == "reproducible"
        self.module = module
        self._trainable = Trainable(module)
        for number in manager.reduced_before(self._trainable.parameters):  # else torch raises in backward
            raise ValueError(
                f"the parameters of `module` must be in one wrapper, but {self._trainable.names[number]} is in another "
                "one too: wrap one module that has all that share a parameter, such as a `torch.nn.ModuleDict`."
            )
        self._manager = manager
        self._bucket_cap_mb = bucket_cap_mb
        self._finds_unused = find_unused_parameters
        self._pending: list[Work] = []
        self._reduced: list[_Reduced] = []  # one entry for each bucket
        self._num_started = 0  # of them
        self._own: list[Tensor | None] = []  # this rank's gradients, as of `finish`
        self._final: list[tuple[Tensor, Tensor]] = []  # the gradients after the last backward (DDP-7)
        self._waiting: list[tuple[Tensor, int]] = []  # those whose reduction is to come, and their versions
        self._accumulates = False
        self._has_followed = False  # in this step (DDP-11)
        self._is_under_way = False  # torch's wrapper expects a backward that reaches all parameters
        self._has_warned = False
        self._build()
        self._of_slots = slot_gradients(manager, over, module, self.buckets, reduction, keep=keep)
        manager.add_reducer(self)

    def _build(self) -> None:
        # DDP itself uses a group of one rank, which never changes (DDP-1); the hook communicates with the other ranks.
        empty = self._manager.empty
        with (
            warnings.catch_warnings(),
            self._trainable.required(),
            AllocatesVectors(empty) if self._finds_unused else contextlib.nullcontext(),
        ):
            warnings.simplefilter("ignore")
            ddp = _FixedBuckets(
                self.module,
                self._trainable,
                process_group=ProcessGroupDummy(0, 1),
                init_sync=False,
                forward_sync_buffers=False,
                find_unused_parameters=self._finds_unused,
                gradient_as_bucket_view=True,
                bucket_cap_mb=self._bucket_cap_mb,
            )
        ddp.register_comm_hook(None, self._hook)
        self._parameters_of = ddp.fix(empty)  # each bucket
        self._places_of = [_places_of(parameters) for parameters in self._parameters_of]
        self._strides = self._trainable.strides
        self._ddp = [ddp]  # in a list, so that it is not a submodule: its parameters would appear twice

    @property
    def buckets(self) -> list[list[Tensor]]:
        """The parameters whose gradients are reduced together, in the order in which backward is likely to reach them.
        `bucket_cap_mb` limits their size."""
        return self._parameters_of

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._of_slots is not None:
            self._of_slots.check_forward()
        if not self._accumulates or self._reduced:  # DDP-6
            return self.module(*args, **kwargs)
        ddp = self._ddp[0]
        self._is_under_way = self._is_under_way or (torch.is_grad_enabled() and ddp.require_backward_grad_sync)
        return ddp(*args, **kwargs)

    @contextlib.contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        """Use it around forward and backward of one slot. `last`: the rank's last slot, whose backward reduces. With
        several backwards in that slot, give only the last one `last=True`.

        Raises:
            InvalidOperationError: with `reduction="reproducible"` or `keep`, outside the loop over the slots of a
                `GlobalBatch`. Or a backward follows the one that reduces, or a gradient is replaced or dropped then;
                `optim.step` raises it too, and backward itself raises RuntimeError if the one that reduces has not
                reached all parameters. Or a parameter requires gradients that did not when the module was wrapped; so
                does `optim.step`. Or this rank has had no slots in an earlier loop of the step, outside of
                `torch.no_grad()`, and has reduced its zeros there.
            MismatchError: where ranks hold parts of the model, a restarted one trains other parameters (ALIKE-3).
        """
        self._manager.step.check()
        self._manager.step.check_gradients()
        if self._reduced:
            raise _late()
        if not self._has_followed:
            self._follow()
        if self._of_slots is not None:
            self._of_slots.enter_slot()
        # torch's reducer must not look for unused parameters here: it raises if an earlier slot's gradient is gone.
        has_part = self._manager.step.share is not None  # DRIVER-10
        by_hook = last and has_part and (self._of_slots is None or not self._finds_unused)
        self._accumulates = True
        try:
            with contextlib.nullcontext() if by_hook else self._ddp[0].no_sync():
                yield
        finally:
            self._accumulates = False
        self._check_late()
        if last and has_part:
            every = (each for bucket in self._parameters_of for each in bucket)
            self._final = [(each, grad) for each in every if (grad := each.grad) is not None]
            waiting = (each.grad for bucket in self._parameters_of[len(self._reduced) :] for each in bucket)
            self._waiting = [(grad, grad._version) for grad in waiting if grad is not None]

    def _hook(self, state: None, bucket: GradBucket) -> Future[Tensor]:
        """DDP-3, DDP-4."""
        self._reduce(bucket)
        done: Future[Tensor] = Future()
        done.set_result(bucket.buffer())
        return done

    def _reduce(self, bucket: GradBucket) -> None:
        index, buffer = len(self._reduced), bucket.buffer()
        parameters = bucket.parameters()
        gradients = self._gradients_in(buffer, index)
        own = [None if each.grad is None else part for each, part in zip(parameters, gradients, strict=True)]
        self._reduced.append(_Reduced(parameters, gradients, own, buffer, buffer._version))
        self._start_in_turn()

    @property
    def form(self) -> Form:
        return self._trainable.form(f"DistributedDataParallel({self._options})", self._parameters_of)

    @property
    def order(self) -> Form:
        if self._of_slots is not None:
            return ()  # the sums of slots keep the order in which the module was wrapped
        named = zip(self._trainable.names, self._trainable.parameters, strict=True)
        found = [(name, _places_of([each])[0]) for name, each in named if not each.is_contiguous()]
        return tuple(
            (f"the order in memory of {name}", str(place.stride)) for name, place in found if not place.is_contiguous
        )

    @property
    def reduced(self) -> list[nn.Parameter]:
        return self._trainable.parameters

    @property
    def has_started(self) -> bool:
        return self._num_started == len(self._parameters_of)

    def _start_in_turn(self) -> None:
        """DDP-10."""
        if not self._manager.is_turn_of(self):
            return
        while self._num_started < len(self._reduced):
            index, each = self._num_started, self._reduced[self._num_started]
            self._num_started += 1
            if self._of_slots is not None:
                self._of_slots.reduce(index, each.own)
                continue
            # `data` has a version of its own: the reduction is no late backward (DDP-7).
            self._start(each.buffer.data)

    def _gradients_in(self, buffer: Tensor, index: int) -> list[Tensor]:
        """Those of the parameters of bucket `index`, in its `buffer`."""
        return [place.of(buffer) for place in self._places_of[index]]

    def _start(self, tensor: Tensor) -> None:
        work = self._manager.reduction(self._over).all_reduce(tensor, ReduceOperation.SUM, async_op=True)
        assert work is not None
        self._pending.append(work)

    def _check_late(self) -> None:
        """DDP-7. Raises InvalidOperationError."""
        if any(each.buffer._version != each.version for each in self._reduced):
            raise _late()
        if any(grad._version != version for grad, version in self._waiting):
            raise _late()
        if any(each.grad is not grad for each, grad in self._final):
            raise _late()

    def contribute(self) -> None:
        self._check_late()
        self._follow()
        self._final, self._waiting = [], []
        if len(self._reduced) == len(self._parameters_of):
            self._start_in_turn()
            return
        for bucket in zeroed_buckets(self._ddp[0].reducer)[len(self._reduced) :]:
            gradients = self._gradients_in(bucket.buffer(), len(self._reduced))
            with torch.no_grad():
                for parameter, gradient in zip(bucket.parameters(), gradients, strict=True):
                    if parameter.grad is not None:
                        gradient.copy_(parameter.grad)
            self._reduce(bucket)
        if self._is_under_way:
            self._warn_of_unused()
            self._rebuild()

    def _warn_of_unused(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "the last backward of step %d did not reach all parameters of the module; if that is usual, "
                "`DistributedDataParallel(..., find_unused_parameters=True)` takes less time",
                self._manager.step.index,
            )

    @property
    def has_all(self) -> bool:
        return self._of_slots is not None or all(part is not None for each in self._reduced for part in each.own)

    @property
    def exchanged(self) -> Sequence[str]:
        """(): it exchanges nothing within a replica group."""
        return ()

    def finish(self) -> None:
        for work in self._pending:
            work.wait()
        if self._of_slots is not None:
            self._of_slots.finish()
            self._forget()
            return
        self._own = [gradient for each in self._reduced for gradient in each.own]
        for each in self._reduced:
            for parameter, gradient in zip(each.parameters, each.gradients, strict=True):
                parameter.grad = gradient
        self._forget()

    def stages_of(self, parameter: Tensor) -> Sequence[int]:
        """(): no other stage has it."""
        return ()

    def leave_out_unused(self) -> None:
        """DDP-8."""
        if self._of_slots is not None:
            return
        parameters = [parameter for bucket in self._parameters_of for parameter in bucket]
        counts = counts_of(self._own, torch.int32, parameters[0].device)
        work = self._manager.reduction(self._over).all_reduce(counts, ReduceOperation.SUM, async_op=True)
        assert work is not None
        if work.wait():
            for parameter, count in zip(parameters, counts.tolist(), strict=True):
                if not count:
                    parameter.grad = None

    def _follow(self) -> None:
        """DDP-11, before the first forward of a step and before the vote. Raises InvalidOperationError: as
        `Trainable.check`; or a parameter lies in memory in another order than in the first forward of the step."""
        self._trainable.check(dtypes=not self._has_followed)
        if (strides := self._trainable.strides) != self._strides:
            if self._has_followed:
                pairs = zip(self._trainable.names, strides, self._strides, strict=True)
                raise InvalidOperationError(
                    f"{next(name for name, now, then in pairs if now != then)} lies in memory in another order than in "
                    "the first forward of the step: change it before that, on all ranks."
                )
            self._rebuild()
        self._has_followed = True

    def _forget(self) -> None:
        self._pending, self._reduced, self._num_started, self._final, self._waiting = [], [], 0, [], []
        self._is_under_way = self._has_followed = False

    def drop(self, *, rebuild: bool) -> None:
        for work in self._pending:
            work.wait()
        if self._of_slots is not None:
            self._of_slots.drop()
        self._forget()
        for parameter in self.module.parameters():
            parameter.grad = None
        if rebuild:
            self._rebuild()

    def _rebuild(self) -> None:
        self._ddp.clear()
        self._build()

    def close(self) -> None:
        self._forget()
        if self._of_slots is not None:
            self._of_slots.close()
        self._ddp.clear()  # its hook keeps this object and the module alive

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self.module, memo)  # a copy is in no step, and has no gradients to reduce

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)


def _places_of(parameters: list[Tensor]) -> list[_Place]:
    """DDP-9: as torch's reducer lays them out. A parameter with gaps in memory has a contiguous gradient."""
    places, start = [], 0
    for parameter in parameters:
        has_gaps = torch.empty_like(parameter, device="meta").stride() != parameter.stride()
        like = torch.empty(parameter.shape, device="meta") if has_gaps else parameter
        places.append(_Place(parameter.shape, like.stride(), start, parameter.is_complex()))
        start += parameter.numel() * (2 if parameter.is_complex() else 1)
    return places


def _late() -> InvalidOperationError:
    return InvalidOperationError(
        "a backward inside `accumulate(last=True)` has begun to reduce the gradients, so that nothing may change them "
        "until `optim.step`: call `backward` once there, of the sum of the losses, and earlier ones inside "
        "`accumulate(last=False)`; to clip gradients, give `optim.step` a `max_norm`."
    )
