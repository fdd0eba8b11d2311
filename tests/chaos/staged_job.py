"""A training job of four blocks, in layouts that divide them among the stages of a pipeline, over `sdp`, or both. In
double precision, so that only the order of summation differs between layouts.

`python staged_job.py DIRECTORY LAYOUT STEPS EVERY`. LAYOUT: as `--layout`. EVERY: steps between two checkpoints; 0 for
none. It appends each committed step, its loss, the sizes in force and the generation to `steps-PID`, and writes
`done-PID` with its parts of the parameters of its stage and of what AdamW keeps of them, by their names in the whole
model.
It waits in the step that stands in the file `hold`, while that is there, and says so by the file `at-STEP-PID`, and
by `join-STEP-PID` that it knows of a rank that waits to join. It leaves once there is a file `leave-PID`.

With OWN_NAMES in the environment, a stage numbers its own blocks from 0, and `names` says what they are in the model;
with OWN_NAMES=alone, nothing does. With KEEP, survivors keep their slots. With FORGETS, the last of three stages lacks
its last block. With DIE_MOVING, the rank of this number on its host is killed when it has sent the first piece of the
state that it keeps, once.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import elasticgang as eg
from elasticgang import testing
from elasticgang.train import Slots
from tests.chaos.reshaped_job import die_once, wait_or_leave
from tests.chaos.resumed_job import Seen
from tests.chaos.resumed_sharded_job import NUM_SAMPLES, WIDTH, FeedForward, Part, data, part_of

NUM_BLOCKS, SLOT = 4, 2
OWN_NAMES, KEEP = os.environ.get("OWN_NAMES", ""), bool(os.environ.get("KEEP"))


class Stage(nn.Module):
    """Blocks `numbers` of the model. `bias` is a buffer that every stage has."""

    bias: Tensor

    def __init__(self, numbers: range) -> None:
        super().__init__()
        torch.manual_seed(7)
        blocks = [FeedForward() for _ in range(NUM_BLOCKS)]
        first = numbers.start if OWN_NAMES else 0
        self.blocks = nn.ModuleDict({str(number - first): blocks[number] for number in numbers})
        self.register_buffer("bias", torch.linspace(0.0, 0.1, WIDTH, dtype=torch.float64))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks.values():
            hidden = block(hidden) + self.bias
        return hidden


def loss_sum(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().sum()


def builder(manager: eg.QuorumManager) -> tuple[Callable[[Any], dict[str, object]], Callable[[Any, str], str]]:
    """For `manager.build`: what makes a stage and its optimizer, and the names."""
    is_sharded = any(each.sdp > 1 for each in manager.layouts)
    meta = torch.empty(SLOT, WIDTH, dtype=torch.float64, device="meta")

    def numbers(stage: int) -> range:
        first, last = (NUM_BLOCKS * each // manager.layout.pp for each in (stage, stage + 1))
        return range(first, last - (stage == 2 and "FORGETS" in os.environ))

    def build(seat: eg.ModelCoordinates) -> dict[str, object]:
        stage = Stage(numbers(seat.pp))
        if is_sharded:
            for part in (*stage.blocks.values(), stage):
                fully_shard(part, mesh=manager.gangs.device_mesh("sdp"))
        if manager.layout.pp > 1:
            model: eg.ShardedDataParallel = eg.PipelineParallel(
                manager, stage, inputs=meta, outputs=meta, loss_sum=loss_sum, keep=KEEP
            )
        else:
            model = eg.ShardedDataParallel(manager, stage, keep=KEEP)
        decayed = [each for each in model.parameters() if each.ndim > 1]
        others = [each for each in model.parameters() if each.ndim == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        adam = torch.optim.AdamW(groups, lr=0.05)
        slower = torch.optim.lr_scheduler.ExponentialLR(adam, 0.97)
        return {"model": model, "optim": eg.Optimizer(manager, adam), "slower": slower}

    def name(seat: eg.ModelCoordinates, own: str) -> str:
        head, found, rest = own.partition("blocks.")
        number, _, tail = rest.partition(".")
        return f"{head}blocks.{int(number) + numbers(seat.pp).start}.{tail}" if found else own

    return build, name


def forward_and_backward(model: Any, slots: Slots, is_staged: bool) -> Tensor:
    """Returns the sum of the losses that this rank knows."""
    inputs, targets = data()
    total = torch.zeros((), dtype=torch.float64)
    if is_staged:
        index = torch.cat([slot.index for slot in slots]) if slots else torch.empty(0, dtype=torch.int64)
        return sum(model.run(slots, inputs[index], targets[index]), total)
    for slot in slots:
        with model.accumulate(last=slot.last):
            loss = loss_sum(model(inputs[slot.index]), targets[slot.index])
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


def named_state(state: Any, name_of: Callable[[str], str]) -> dict[str, Part]:
    """This rank's parts of the parameters and of what AdamW keeps of them."""
    found = {}
    for own, parameter in state.model.module.named_parameters():
        name = name_of(own)
        found[name] = part_of(parameter)
        found |= {f"{name}:{key}": part_of(value) for key, value in state.optim.optim.state[parameter].items()}
    return found


def main() -> None:
    here, layout, num_steps, every = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:5])
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    manager = eg.join(layout=eg.ParallelLayout.parse(layout))
    batches = eg.GlobalBatch(NUM_SAMPLES, size=8, slot=SLOT, seed=5)
    build, name = builder(manager)
    names = name if OWN_NAMES and OWN_NAMES != "alone" else None
    state, seen = manager.build(build, names=names), Seen()
    manager.register_state(seen=seen)
    if every:
        manager.checkpoints(every_steps=every)
    if os.environ.get("DIE_MOVING") == os.environ.get("LOCAL_RANK", ""):
        testing.fail_at("piece_sent", lambda: die_once(here / "died-moving"))
    result: dict[str, Part] = {}
    for step in manager.steps(num_steps):
        with step:
            slots, sizes = batches.slots(step), manager.layout
            total = forward_and_backward(state.model, slots, sizes.pp > 1)
            wait_or_leave(manager, here, step)
            seen.indices = [*seen.indices, step.index]
            if state.optim.step(weight=slots.num_samples, max_norm=0.5, sums={"loss": total}):
                state.slower.step()
                loss = state.optim.sums["loss"]
                with open(here / f"steps-{os.getpid()}", "a") as file:
                    file.write(f"{step.index} {loss!r} {sizes.pp}x{sizes.sdp} {manager.generation}\n")
                if step.index == num_steps - 1:
                    seat = eg.ModelCoordinates(manager.gangs.pp.rank, 0, 0)
                    result = named_state(state, functools.partial(name, seat) if OWN_NAMES else str)
    if manager.leave_requested:
        return
    assert seen.indices == list(range(num_steps)), seen.indices
    (here / f"done-{os.getpid()}").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
