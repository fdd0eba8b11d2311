"""A training job of every kind of parallelism, by hand, that kills itself at the places it is told to.

Two residual blocks of two linear layers each: over `tp` the first is split by columns and the second by rows; over
`sdp` each rank keeps a part of every parameter and gathers it to use it; over `pp` each stage has its own blocks.
Everything is in double precision, so that the run of one process has the same losses up to the order of summation.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import elasticgang as eg
from elasticgang.state.dtensor import local, locally
from elasticgang.train import Slots
from tests.chaos.job import Faults, History, digest_of

NUM_SAMPLES, BATCH_SIZE, SLOT, SEED = 37, 16, 2, 5
WIDTH, HIDDEN, NUM_BLOCKS = 4, 8, 2
DTYPE = torch.float64
MAX_NORM = 2.0  # less than the norm in some of the steps


class _Copied(torch.autograd.Function):
    """The same input on every rank of the gang; the gradients of it are summed."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gang: eg.Gang) -> Tensor:
        ctx.gang = gang
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        summed = grads[0].clone()
        ctx.gang.all_reduce(summed, eg.ReduceOperation.SUM)
        return summed, None


class _Summed(torch.autograd.Function):
    """The sum of every rank's part."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gang: eg.Gang) -> Tensor:
        summed = tensor.clone()
        gang.all_reduce(summed, eg.ReduceOperation.SUM)
        return summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gathered(torch.autograd.Function):
    """A parameter, whole, from every rank's part of it; each gets the sum of the gradients of its own."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, gang: eg.Gang) -> Tensor:
        ctx.gang = gang
        whole = part.new_empty((gang.size, *part.shape))
        gang.all_gather(whole, part.detach())
        return whole.view(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        part = grads[0].new_empty(grads[0].numel() // ctx.gang.size)
        ctx.gang.reduce_scatter(part, grads[0].contiguous().view(ctx.gang.size, -1), eg.ReduceOperation.SUM)
        return part, None


def _applied(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


SHAPES = {"w1": (HIDDEN, WIDTH), "b1": (HIDDEN,), "w2": (WIDTH, HIDDEN), "b2": (WIDTH,)}
SPLIT_OVER_TP = {"w1": 0, "b1": 0, "w2": 1, "b2": None}  # by which dimension


def initial(block: int) -> dict[str, Tensor]:
    """Whole, and the same in every process."""
    generator = torch.Generator().manual_seed(block)
    return {name: 0.5 * torch.randn(shape, generator=generator, dtype=DTYPE) for name, shape in SHAPES.items()}


class Block(nn.Module):
    """One part of a block; computes the block with those that have the others."""

    steps: Tensor

    def __init__(
        self, block: int, seat: eg.ModelCoordinates, layout: eg.ParallelLayout, gangs: eg.Gangs, is_whole: bool
    ) -> None:
        """`is_whole`: not sharded over `sdp` here."""
        super().__init__()
        self._gangs = gangs
        self._shapes: dict[str, torch.Size] = {}
        self._is_whole = is_whole
        for name, value in initial(block).items():
            dim = SPLIT_OVER_TP[name]
            part = value if dim is None else value.chunk(layout.tp, dim)[seat.tp]
            self._shapes[name] = part.shape
            kept = part.clone() if is_whole else part.flatten().chunk(layout.sdp)[seat.sdp].clone()
            self.register_parameter(name, nn.Parameter(kept))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def _whole(self, name: str) -> Tensor:
        if self._is_whole:
            return self.get_parameter(name)
        gathered = _applied(_Gathered, self.get_parameter(name), self._gangs.sdp)
        return gathered.view(self._shapes[name])

    def forward(self, hidden: Tensor) -> Tensor:
        w1, b1, w2, b2 = map(self._whole, SHAPES)
        inner = torch.tanh(nn.functional.linear(_applied(_Copied, hidden, self._gangs.tp), w1, b1))
        summed = _applied(_Summed, nn.functional.linear(inner, w2), self._gangs.tp)
        return hidden + summed + b2


def whole_parameters(parts: dict[tuple[int, int, int], dict[str, list[float]]]) -> dict[str, list[float]]:
    """The unsharded parameters, from those of every (pp, sdp, tp)."""
    whole = {}
    num_pp, num_sdp, num_tp = (max(seat[axis] for seat in parts) + 1 for axis in range(3))
    for pp in range(num_pp):
        for key in parts[pp, 0, 0]:
            name = key.rpartition(".")[2]
            dim, shape = SPLIT_OVER_TP[name], list(SHAPES[name])
            if dim is not None:
                shape[dim] //= num_tp
            of_tp = [
                torch.cat([torch.tensor(parts[pp, sdp, tp][key], dtype=DTYPE) for sdp in range(num_sdp)]).view(shape)
                for tp in range(num_tp)
            ]
            whole[key] = (of_tp[0] if dim is None else torch.cat(of_tp, dim)).flatten().tolist()
    return whole


class Adam(torch.optim.Adam):
    """Can die when it has changed half of the parameters."""

    faults: Faults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        half = len(parameters) // 2
        for part in (parameters[:half], parameters[half:]):
            self.param_groups[0]["params"] = part
            super().step()
            if part[0] is parameters[0]:
                self.faults.at("torn")
        self.param_groups[0]["params"] = parameters


class Pipeline:
    """Forward and backward of one slot, with the stages before and after this one."""

    def __init__(self, state: Any, layout: eg.ParallelLayout, gangs: eg.Gangs, args: argparse.Namespace) -> None:
        self._model, self._pp, self._num_stages = state.model, gangs.pp, layout.pp
        self._sdp, self._adds, self._sums = gangs.sdp, args.adds, args.sums

    def run(self, sample: Tensor, target: Tensor, last: bool, faults: Faults) -> float:
        """The loss, in the last stage; 0 in the others."""
        stage = self._pp.rank
        with self._model.accumulate(last=last):
            if self._adds:
                self._model.module.set_requires_gradient_sync(last)
            hidden = sample
            if stage > 0:
                hidden = torch.empty_like(sample)
                self._pp.recv(hidden, stage - 1)
                hidden.requires_grad_(True)
            output = self._model(hidden)
            faults.at("forward")
            if self._sums:
                eg.all_sum(self._sdp, 1.0)
            if stage < self._num_stages - 1:
                self._pp.send(output.detach(), stage + 1)
                grad = torch.empty_like(output)
                self._pp.recv(grad, stage + 1)
                output.backward(grad)
                value = 0.0
            else:
                loss = (output - target).square().sum()
                loss.backward()
                value = loss.item()
            if stage > 0:
                assert hidden.grad is not None
                self._pp.send(hidden.grad, stage - 1)
        return value


class Schedule:
    """As `eg.PipelineParallel` runs all slots of a step. `losses`: by step and slot, in the last stage. A slot is done
    for the faults when its forward begins; "slot" is reached in the forwards from the fifth one on."""

    def __init__(
        self, manager: eg.QuorumManager, faults: Faults, losses: dict[tuple[int, int], float], *, sums: bool
    ) -> None:
        self._manager, self._faults, self._losses, self._sums = manager, faults, losses, sums
        self._numbers: Iterator[tuple[int, int]] = iter(())  # of the slots whose forward is to come, with their places
        self._with_loss: Iterator[int] = iter(())

    def wrap(self, blocks: nn.Module, slot: int, *, keep: bool) -> eg.PipelineParallel:
        blocks.register_forward_pre_hook(self._begins)
        meta = torch.empty(slot, WIDTH, dtype=DTYPE, device="meta")
        return eg.PipelineParallel(self._manager, blocks, inputs=meta, outputs=meta, loss_sum=self._loss_sum, keep=keep)

    def _begins(self, *_: object) -> None:
        place, number = next(self._numbers)
        self._faults.slot_done(number)
        if place >= 4:
            self._faults.at("slot")
        if self._sums:
            eg.all_sum(self._manager.gangs.sdp, 1.0)

    def _loss_sum(self, output: Tensor, target: Tensor) -> Tensor:
        loss = (output - target).square().sum()
        self._losses[self._manager.step.index, next(self._with_loss)] = loss.item()
        return loss

    def run(self, model: eg.PipelineParallel, slots: Slots, samples: Tensor, targets: Tensor) -> None:
        numbers = [slot.number for slot in slots]
        self._numbers, self._with_loss = enumerate(numbers), iter(numbers)
        index = torch.cat([slot.index for slot in slots]) if numbers else torch.empty(0, dtype=torch.int64)
        model.run(slots, samples[index], targets[index])


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    samples = torch.randn(NUM_SAMPLES, WIDTH, generator=generator, dtype=DTYPE)
    return samples, samples.flip(1).tanh()


def blocks_of(stage: int, num_stages: int) -> Iterator[int]:
    return iter(range(stage * NUM_BLOCKS // num_stages, (stage + 1) * NUM_BLOCKS // num_stages))


def evaluate(model: nn.Module, samples: Tensor) -> None:
    with torch.no_grad():
        model(samples)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    for axis in ("pp", "sdp", "tp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--fsdp", action="store_true", help="shard over sdp by torch's FSDP2")
    parser.add_argument("--reduction", default="sum")
    parser.add_argument("--keep", action="store_true", help="keep the gradients of slots when a step is tried again")
    parser.add_argument("--slot", type=int, default=SLOT, help="samples in a slot")
    parser.add_argument("--schedule", action="store_true", help="run the stages by a schedule of torch's")
    parser.add_argument("--adds", action="store_true", help="FSDP2 adds the slots' gradients, and reduces in the last")
    parser.add_argument("--evaluates", action="store_true", help="also before and behind the slots of each step")
    parser.add_argument("--sums", action="store_true", help="use the gang sdp within each slot, before its backward")
    parser.add_argument("--write-parameters", action="store_true", help="after each step, not only at the end")
    parser.add_argument("--active", type=int, help="of the ranks, without the spares")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--faults", type=json.loads, default=[])
    args = parser.parse_args()

    torch.set_num_threads(1)
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    faults = Faults(args.output_dir, args.faults, num_ranks, args.active)
    faults.at("start")
    layout = eg.ParallelLayout(pp=args.pp, sdp=args.sdp, tp=args.tp)
    manager = eg.join(layout=layout)
    faults.install(manager)

    def build(seat: eg.ModelCoordinates) -> dict[str, object]:
        gangs = manager.gangs
        blocks = nn.Sequential(
            *(Block(block, seat, layout, gangs, args.fsdp) for block in blocks_of(seat.pp, layout.pp))
        )
        if args.fsdp:
            mesh = gangs.device_mesh("sdp")
            for block in list(blocks)[: -1 if args.evaluates else None]:
                fully_shard(block, mesh=mesh)
            fully_shard(blocks, mesh=mesh)  # the root has the parameters of the others
        if args.schedule:
            model: nn.Module = schedule.wrap(blocks, args.slot, keep=args.keep)
        elif args.fsdp:
            model = eg.ShardedDataParallel(manager, blocks, reduction=args.reduction, keep=args.keep)
        else:
            model = eg.DistributedDataParallel(manager, blocks, over="rdp", reduction=args.reduction, keep=args.keep)
        adam = Adam(model.parameters(), lr=0.02)
        adam.faults = faults
        history.write("built", part=list(seat))
        faults.at("built")
        alike = [value for name, value in model.named_parameters() if name.endswith("b2")]
        return {"model": model, "optim": eg.Optimizer(manager, adam, replicated={"tp": alike})}

    history = History(args.output_dir / "history", manager.member)
    losses: dict[tuple[int, int], float] = {}  # by step and slot, for those that are kept
    schedule = Schedule(manager, faults, losses, sums=args.sums)
    state = manager.build(build)
    batches = eg.GlobalBatch(NUM_SAMPLES, size=BATCH_SIZE, slot=args.slot, seed=SEED)
    samples, targets = data()
    faults.at("joined")

    def parameters(stage: int) -> dict[str, list[float]]:
        return {
            f"{block}.{name}": local(value).flatten().tolist()
            for block, module in zip(blocks_of(stage, layout.pp), state.model.module, strict=True)
            for name, value in module.named_parameters()
        }

    for step in manager.steps(args.steps):
        with step:
            faults.at("step")
            faults.wait_for_company()
            for block in state.model.module:
                block.steps.add_(1)
            if args.evaluates:
                evaluate(state.model, samples)
            slots = batches.slots(step)
            if slots.kept:
                kept = [slot.number for slot in slots.kept]
                history.write("kept", step=step.index, generation=step.generation, slots=kept)
            gangs = manager.gangs
            pipeline = Pipeline(state, layout, gangs, args)
            seat = [gangs.pp.rank, gangs.rdp.rank, gangs.sdp.rank, gangs.tp.rank]
            if args.schedule:
                schedule.run(state.model, slots, samples, targets)
            for slot in () if args.schedule else slots:
                value = pipeline.run(samples[slot.index], targets[slot.index], slot.last, faults)
                losses[step.index, slot.number] = value
                if args.keep or args.adds:
                    computed = {"slot": slot.number, "seat": seat, "lost": manager.poisoned}
                    history.write("computed", step=step.index, generation=step.generation, **computed)
                    faults.slot_done(slot.number)
                    faults.at("slot")
            if args.evaluates:
                evaluate(state.model, samples)
            faults.at("body")
            mine = (*slots.kept, *slots)
            taken = [int(sample) for slot in mine for sample in slot.index]
            numbers = [slot.number for slot in mine]
            loss = math.fsum(losses.get((step.index, number), 0.0) for number in numbers)
            share = {
                "samples": taken,
                "slots": numbers,
                "loss": loss,
                "seat": seat,
                "active": manager.num_active,
                "tip": manager.tip,
            }
            history.write("prepared", step=step.index, generation=step.generation, **share)
            if state.optim.step(weight=slots.num_samples, max_norm=MAX_NORM):
                assert manager.tip is not None
                written = {"parameters": parameters(seat[0])} if args.write_parameters else {}
                history.write("committed", step=step.index, generation=manager.tip.generation, seat=seat, **written)

    digest = digest_of(locally(state.model.state_dict()), locally(state.optim.state_dict()))
    counted = [int(block.steps) for block in state.model.module]
    history.write("finished", digest=digest, seat=seat, parameters=parameters(seat[0]), steps=counted)
    faults.at("finished")


if __name__ == "__main__":
    main()
