"""One stage of a pipeline, run by a schedule of torch.distributed.pipelining over the gang `pp`.

PIPELINE-1  Nothing of a step outlives it: each step has a new stage and a new schedule. A generation that ends in the
    middle leaves them in any state, and the number of slots changes with the number of replica groups.
PIPELINE-2  The losses are sums, and no gradient is scaled: `Optimizer.step(weight=)` divides them.
PIPELINE-3  With `keep`, the gradient of each slot is taken from the parameters before the next slot's backward. Stages
    finish a slot at different times (KEEP-4).
PIPELINE-4  The messages that a stage sends and receives between two computations start together (MESSAGES-1). Otherwise
    two neighbours that both send before they receive would wait for each other, on a device.
PIPELINE-5  The gradients of a tied parameter are added after the sum over the replica groups, and on every rank, also
    one without slots. The first of its stages adds them, so that all have the same bits. A script could not: in the
    step, the gradients are not yet those of all slots, and a kept slot's would count twice.
PIPELINE-6  Before the first of these sums in a generation, each two stages compare what they are to add: a stage that
    has another order, or another part of the parameter, would add other elements without an error, and one that adds
    nothing would let the others wait. In step 0 they compare some of the values too. All ranks of the pipeline see what
    differs, so that all of them raise the same error.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from elasticgang.errors import InvalidOperationError, NotSupportedError
from elasticgang.gang import Gang
from elasticgang.gang.torch_process_group import GangProcessGroup
from elasticgang.member.manager import QuorumManager
from elasticgang.state.dtensor import like, local
from elasticgang.train.data import Slots, mixed, seed_generators
from elasticgang.train.data_loader import LoadedSlots
from elasticgang.train.sharded import ShardedDataParallel, some_bytes


class PipelineParallel(ShardedDataParallel):
    """Wraps `module`, this rank's stage of the model, and runs it with the other stages of `manager.gangs.pp`. Sums its
    gradients over `manager.gangs.rdp`, as `ShardedDataParallel` does; it may be sharded over `sdp` by `fully_shard`.
    `names` of `QuorumManager.build` says how its state moves to layouts of other stages.
    """

    def __init__(
        self,
        manager: QuorumManager,
        module: nn.Module,
        *,
        inputs: Tensor,
        outputs: Tensor,
        loss_sum: Callable[[Tensor, Tensor], Tensor],
        keep: bool = False,
        tied: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """`inputs`, `outputs`: tensors like those that this stage gets and returns for one slot, also on the device
        "meta". `loss_sum`: returns the sum of the losses of one slot from the last stage's output and the targets.
        `keep`: as of `DistributedDataParallel`. `slots` are then without `slots.kept`, and so are the losses.
        `tied`: for the names of parameters that several stages have, such as an embedding that is also the output, the
        numbers of these stages, like `{"embedding.weight": (0, manager.layout.pp - 1)}`. Their gradients are added over
        the stages. The values must be equal at the start, and then stay so. On each stage give the same stages in the
        same order; the names may differ. The norm for `max_norm` counts the gradient once. The first `optim.step`
        raises InvalidOperationError on all stages if their parameters differ in number, shape, dtype, placements or
        values.

        Raises:
            ValueError: `tied` names stages that there are not, or one stage alone, or a parameter that this stage does
                not have, or one twice.
            NotSupportedError: `keep` is set, and `module` is sharded by `fully_shard`: in a pipeline it reduces the
                gradients of all slots together.
        """
        if keep and any(isinstance(part, FSDPModule) for part in module.modules()):
            raise NotSupportedError(
                "`keep` needs the gradient of each slot, but `fully_shard` reduces those of all slots of a pipeline "
                "together; leave out one of them."
            )
        own = _own_tied(module, tied or {}, manager.gangs.pp)
        super().__init__(manager, module, keep=keep)
        self._tied = own
        if tied:
            self._options += f", tied={[(name, *sorted(set(stages))) for name, stages in tied.items()]}"
        self._inputs, self._outputs = _like_meta(inputs), _like_meta(outputs)
        self._loss_sum = loss_sum

    def run(self, slots: Slots | LoadedSlots, inputs: Tensor | None, targets: Tensor | None) -> list[Tensor]:
        """Forward and backward of all `slots`, one microbatch to a slot, by the 1F1B schedule; by GPipe's if there are
        fewer slots than stages. Call it once in a step, on every rank.

        `slots`: of a `GlobalBatch`, or of a loader whose `slots.load()` has given the samples.
        `inputs`: those of all slots behind one another along dim 0, used by the first stage. `targets`: likewise, used
        by the last stage. Both may be None if there are no slots. Returns the sum of the losses of each slot on the
        last stage, and [] on the others.

        torch's random generators are seeded before each slot's forward, differently on each stage.

        Raises:
            InvalidOperationError: as `accumulate`, if this rank has had no slots in an earlier loop of the step.
            MismatchError: as `accumulate`.
        """
        self._manager.step.check()
        found: list[Tensor] = []
        if len(slots):
            self._manager.step.check_gradients()
            with _batched(self._manager.gangs.pp.as_process_group()) as start_messages:
                self._run_schedule(slots, inputs, targets, found, start_messages)
            self._note_final()
        self._manager.step.check()
        if not len(slots):
            self._manager.step.contribute()
        return [loss.detach() for loss in found]

    def finish(self) -> None:
        super().finish()
        if self._manager.step.is_first and self._manager.gangs.pp.size > 1:
            self._compare_tied()
        for parameter, stages in self._tied:
            self._add_over(stages, parameter)

    def stages_of(self, parameter: Tensor) -> Sequence[int]:
        return next((stages for tied, stages in self._tied if tied is parameter), ())

    def _compare_tied(self) -> None:
        """PIPELINE-6. Raises InvalidOperationError."""
        pp, manager = self._manager.gangs.pp, self._manager
        has_values = manager.step.index == 0 and manager.tip is not None  # not one whose heal has failed
        own = []
        for stage in range(pp.size):
            shared = [(parameter, stages) for parameter, stages in self._tied if stage in stages]
            values = [some_bytes(parameter.detach()).tolist() for parameter, _ in shared] if has_values else None
            own += [_digest_of([(stages, _kind_of(each)) for each, stages in shared]), _digest_of(values)]
        gathered = torch.zeros(pp.size, len(own) + 1, dtype=torch.int64, device=pp.device)
        pp.all_gather(gathered, torch.tensor([*own, _digest_of(own)], device=pp.device))
        rows = gathered.tolist()
        if any(_digest_of(row) != digest for *row, digest in rows):
            return  # the generation has ended, so that not all have come
        found = [list(zip(row[:-1:2], row[1:-1:2], strict=True)) for row in rows]
        for one, other in itertools.combinations(range(pp.size), 2):
            (kinds, values), (their_kinds, their_values) = found[one][other], found[other][one]
            what = f"stages {one} and {other} of the pipeline must have the same parameters in `tied`, but "
            if kinds != their_kinds:
                raise InvalidOperationError(
                    f"{what}have others: name the same stages in the same order on both, for parameters of the same "
                    "shape, dtype and placements."
                )
            if values != their_values and _digest_of(None) not in (values, their_values):
                raise InvalidOperationError(
                    f"{what}have other values of these: name them in the same order on both, and initialize them "
                    "alike, as by the same seed."
                )

    def _add_over(self, stages: Sequence[int], parameter: nn.Parameter) -> None:
        """PIPELINE-5. Behind the gradient: how many stages have one."""
        pp, (first, *others) = self._manager.gangs.pp, stages
        own = torch.zeros_like(local(parameter)) if parameter.grad is None else local(parameter.grad)
        flat = torch.cat([own.detach().flatten(), own.new_tensor([parameter.grad is not None])])
        if pp.rank == first:
            received = torch.empty_like(flat)
            for stage in others:
                pp.recv(received, stage)
                flat += received
            for stage in others:
                pp.send(flat, stage)
        else:
            pp.send(flat, first)
            pp.recv(flat, first)
        parameter.grad = like(flat[:-1].view(own.shape), parameter) if flat[-1] else None

    def close(self) -> None:
        super().close()
        self._tied = []

    def _run_schedule(
        self,
        slots: Slots | LoadedSlots,
        inputs: Tensor | None,
        targets: Tensor | None,
        found: list[Tensor],
        start_messages: Callable[[], None],
    ) -> None:
        """`found`: the losses, on the last stage. `start_messages`: call it before each computation (PIPELINE-4)."""
        from torch.distributed import pipelining  # it takes a second to import

        pp = self._manager.gangs.pp
        kind: Any = pipelining.Schedule1F1B if len(slots) >= pp.size else pipelining.ScheduleGPipe
        stage: Any = pipelining.PipelineStage(  # PIPELINE-1
            self.module,
            pp.rank,
            pp.size,
            pp.device,
            input_args=self._inputs,
            output_args=self._outputs,
            group=pp.as_process_group(),
        )
        numbers = slots.slots if isinstance(slots, LoadedSlots) else slots
        backward = stage.backward_one_chunk
        if self._of_slots is not None:
            self._of_slots.begin()
            backward = self._of_each_slot(backward, numbers)

        def backward_one_chunk(*args: Any, **kwargs: Any) -> None:
            start_messages()
            backward(*args, **kwargs)

        stage.backward_one_chunk = backward_one_chunk
        schedule = kind(stage, len(slots), loss_fn=self._loss_sum, scale_grads=False)  # PIPELINE-2
        seeds = iter([slot.seed for slot in numbers])

        def before_forward(*_: Any) -> None:
            start_messages()
            seed_generators(mixed(next(seeds), pp.rank))

        hook = self.module.register_forward_pre_hook(before_forward)
        try:
            arguments = [inputs] if pp.rank == 0 else []
            last = {"target": targets, "losses": found} if pp.rank == pp.size - 1 else {}
            schedule.step(*arguments, **last, return_outputs=False)
        finally:
            hook.remove()
            self._manager.step.slot = None

    def _of_each_slot(self, backward: Callable[..., None], slots: Slots) -> Callable[..., None]:
        """`backward` of a stage, of which each call is a slot of its own (PIPELINE-3). It raises StepAborted before the
        first slot that begins after the end of the generation: the sums must not get the slot before, which may be
        wrong."""
        step, of_slots = self._manager.step, self._of_slots
        assert of_slots is not None

        def backward_one_slot(chunk: int, *args: Any, **kwargs: Any) -> None:
            step.check()
            step.slot = slots[chunk].number
            of_slots.enter_slot()
            backward(chunk, *args, **kwargs)
            step.end_slot()

        return backward_one_slot


def _own_tied(
    module: nn.Module, tied: Mapping[str, Sequence[int]], pp: Gang
) -> list[tuple[nn.Parameter, Sequence[int]]]:
    """The tied parameters of this stage, each with its stages in ascending order. Raises ValueError, as the constructor
    does."""
    own = dict(module.named_parameters(remove_duplicate=False))
    found: dict[nn.Parameter, Sequence[int]] = {}
    for name, given in tied.items():
        stages = sorted(set(given))
        if not set(stages) <= set(range(pp.size)):
            raise ValueError(
                f"`tied` must name stages from 0 to {pp.size - 1}, but names {stages} for `{name}` instead."
            )
        if len(stages) < min(2, pp.size):
            raise ValueError(
                f"`tied` must name all stages that have a parameter, but names {stages} for `{name}` instead: give "
                "each stage the numbers of all of them, under the name that it has there."
            )
        if pp.rank in stages and name not in own:
            raise ValueError(f"`tied` must name parameters of `module`, but stage {pp.rank} has no `{name}`.")
        if pp.rank not in stages or pp.size == 1:
            continue
        if own[name] in found:
            raise ValueError(f"`tied` must name a parameter once, but `{name}` is one that it has named before.")
        found[own[name]] = stages
    return list(found.items())


def _kind_of(parameter: Tensor) -> str:
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    return f"{tuple(parameter.shape)}, {parameter.dtype}, {placements}"


def _digest_of(value: object) -> int:
    return zlib.crc32(repr(value).encode())


def _batched(pg: dist.ProcessGroup) -> AbstractContextManager[Callable[[], None]]:
    return pg.batched_messages() if isinstance(pg, GangProcessGroup) else nullcontext(lambda: None)


def _like_meta(tensor: Tensor) -> Tensor:
    """Its shape and dtype, which torch then does not send from stage to stage in each step."""
    meta = torch.empty_like(tensor, device="meta")
    return meta.requires_grad_() if meta.is_floating_point() else meta
