"""One stage of a pipeline, run by a schedule of torch.distributed.pipelining over the gang `pp`.

PIPELINE-1  Nothing of a step outlives it: each step has a new stage and a new schedule. A generation that ends in the
    middle leaves them in any state, and the number of slots changes with the number of replica groups.
PIPELINE-2  The losses are sums, and no gradient is scaled: `Optimizer.step(weight=)` divides them.
PIPELINE-3  With `keep`, the gradient of each slot is taken from the parameters before the next slot's backward. Stages
    finish a slot at different times (KEEP-4).
PIPELINE-4  The messages that a stage sends and receives between two computations start together (MESSAGES-1). Otherwise
    two neighbours that both send before they receive would wait for each other, on a device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from elasticgang.errors import NotSupportedError
from elasticgang.gang.torch_process_group import GangProcessGroup
from elasticgang.member.manager import QuorumManager
from elasticgang.train.data import Slots, mixed, seed_generators
from elasticgang.train.data_loader import LoadedSlots
from elasticgang.train.sharded import ShardedDataParallel


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
    ) -> None:
        """`inputs`, `outputs`: tensors like those that this stage gets and returns for one slot, also on the device
        "meta". `loss_sum`: returns the sum of the losses of one slot from the last stage's output and the targets.
        `keep`: as of `DistributedDataParallel`. `slots` are then without `slots.kept`, and so are the losses.

        Raises:
            NotSupportedError: `keep` is set, and `module` is sharded by `fully_shard`: in a pipeline it reduces the
                gradients of all slots together.
        """
        if keep and any(isinstance(part, FSDPModule) for part in module.modules()):
            raise NotSupportedError(
                "`keep` needs the gradient of each slot, but `fully_shard` reduces those of all slots of a pipeline "
                "together; leave out one of them."
            )
        super().__init__(manager, module, keep=keep)
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
        """
        self._manager.step.check()
        found: list[Tensor] = []
        if len(slots):
            with _batched(self._manager.gangs.pp.as_process_group()) as start_messages:
                self._run_schedule(slots, inputs, targets, found, start_messages)
            self._take_sample()
        self._manager.step.check()
        if not len(slots):
            self._manager.step.contribute()
        return [loss.detach() for loss in found]

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


def _batched(pg: dist.ProcessGroup) -> AbstractContextManager[Callable[[], None]]:
    return pg.batched_messages() if isinstance(pg, GangProcessGroup) else nullcontext(lambda: None)


def _like_meta(tensor: Tensor) -> Tensor:
    """Its shape and dtype, which torch then does not send from stage to stage in each step."""
    meta = torch.empty_like(tensor, device="meta")
    return meta.requires_grad_() if meta.is_floating_point() else meta
