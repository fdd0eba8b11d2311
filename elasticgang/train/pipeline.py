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
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from elasticgang.errors import NotSupportedError
from elasticgang.gang.torch_process_group import GangProcessGroup
from elasticgang.member.manager import QuorumManager
from elasticgang.state.dtensor import like, local
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
        tied: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """`inputs`, `outputs`: tensors like those that this stage gets and returns for one slot, also on the device
        "meta". `loss_sum`: returns the sum of the losses of one slot from the last stage's output and the targets.
        `keep`: as of `DistributedDataParallel`. `slots` are then without `slots.kept`, and so are the losses.
        `tied`: for the names of parameters that several stages have, such as an embedding that is also the output, the
        numbers of these stages, like `{"embedding.weight": (0, manager.layout.pp - 1)}`. Their gradients are added over
        the stages. The values must be equal at the start, and then stay so. On each stage give the same stages in the
        same order; the names may differ. The norm for `max_norm` counts the gradient once.

        Raises:
            ValueError: `tied` names stages that there are not, or a parameter that this stage does not have.
            NotSupportedError: `keep` is set, and `module` is sharded by `fully_shard`: in a pipeline it reduces the
                gradients of all slots together.
        """
        if keep and any(isinstance(part, FSDPModule) for part in module.modules()):
            raise NotSupportedError(
                "`keep` needs the gradient of each slot, but `fully_shard` reduces those of all slots of a pipeline "
                "together; leave out one of them."
            )
        pp, given = manager.gangs.pp, {name: sorted(set(stages)) for name, stages in (tied or {}).items()}
        own = dict(module.named_parameters(remove_duplicate=False))
        for name, stages in given.items():
            if not set(stages) <= set(range(pp.size)):
                raise ValueError(
                    f"`tied` must name stages from 0 to {pp.size - 1}, but names {stages} for `{name}` instead."
                )
            if pp.rank in stages and name not in own:
                raise ValueError(f"`tied` must name parameters of `module`, but stage {pp.rank} has no `{name}`.")
        super().__init__(manager, module, keep=keep)
        self._tied = [(own[name], stages) for name, stages in given.items() if pp.rank in stages and len(stages) > 1]
        if given:
            self._options += f", tied={list(given.values())}"
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

    def finish(self) -> None:
        super().finish()
        for parameter, stages in self._tied:
            self._add_over(stages, parameter)

    def stages_of(self, parameter: Tensor) -> Sequence[int]:
        return next((stages for tied, stages in self._tied if tied is parameter), ())

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


def _batched(pg: dist.ProcessGroup) -> AbstractContextManager[Callable[[], None]]:
    return pg.batched_messages() if isinstance(pg, GangProcessGroup) else nullcontext(lambda: None)


def _like_meta(tensor: Tensor) -> Tensor:
    """Its shape and dtype, which torch then does not send from stage to stage in each step."""
    meta = torch.empty_like(tensor, device="meta")
    return meta.requires_grad_() if meta.is_floating_point() else meta
