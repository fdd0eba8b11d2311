"""A training job with checkpoints whose model `fully_shard` divides over `sdp`. In double precision, so that only the
order of summation differs between numbers of ranks.

`python resumed_sharded_job.py DIRECTORY SDP STEPS EVERY`. It appends each committed step and its loss to
`steps-PID`, and writes `done-LOCAL_RANK` with its parts of the parameters and of what AdamW keeps. It waits in the
step that stands in the file `hold`, while that is there, and in a step without all ranks until another one waits to
join.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import elasticgang as eg
from elasticgang.member.step import Step
from elasticgang.state.dtensor import local
from elasticgang.torch_private import local_block
from tests.chaos.resumed_job import Seen, held

NUM_SAMPLES, WIDTH, HIDDEN = 37, 6, 9  # neither divides by 4


class FeedForward(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.up = nn.Linear(WIDTH, HIDDEN, dtype=torch.float64)
        self.down = nn.Linear(HIDDEN, WIDTH, dtype=torch.float64)
        self.register_buffer("scale", torch.full((2,), 0.5, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(inputs)))
        result: Tensor = inputs + self.scale[0] * self.down(hidden)
        return result


class Model(FeedForward):
    def __init__(self) -> None:
        torch.manual_seed(7)
        super().__init__()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(NUM_SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, inputs.flip(1).tanh()


Part = tuple[list[int], list[int], Any]  # of a tensor: the shape of the whole, where the part begins, and its values


def part_of(value: Tensor) -> Part:
    """Of a tensor that may be divided. Nothing communicates: the last step is committed when this is called."""
    block = local_block(value) if isinstance(value, DTensor) else ((), (0,) * value.ndim)
    assert block is not None
    return list(value.shape), list(block[1]), local(value).tolist()


def assembled(ranks: list[dict[str, Part]]) -> list[dict[str, list[float]]]:
    """What each rank has parts of, whole and flat. Parts of the same elements are equal bit for bit."""
    wholes: dict[str, Tensor] = {}
    for name, (shape, start, values) in itertools.chain(*(each.items() for each in ranks)):
        whole = wholes.setdefault(name, torch.full(shape, math.nan, dtype=torch.float64))
        part = torch.tensor(values, dtype=torch.float64)
        if part.numel() or not shape:
            place = whole[tuple(slice(first, first + size) for first, size in zip(start, part.shape, strict=True))]
            assert torch.equal(torch.where(place.isnan(), part, place), part), f"{name} is not the same on all ranks"
            place.copy_(part)
    assert all(not whole.isnan().any() for whole in wholes.values()), "nobody has some part"
    return [{name: wholes[name].flatten().tolist() for name in each} for each in ranks]


def builder(manager: eg.QuorumManager) -> Callable[[eg.ModelCoordinates], dict[str, object]]:
    """For `manager.build`: the model and its optimizer, divided over the `sdp` in force."""

    def build(seat: eg.ModelCoordinates) -> dict[str, object]:
        mesh = manager.gangs.device_mesh("sdp")
        assert mesh.size() == manager.layout.sdp
        model = Model()
        for part in (model.up, model.down, model):
            fully_shard(part, mesh=mesh)
        sharded = eg.ShardedDataParallel(manager, model)
        optim = eg.Optimizer(manager, torch.optim.AdamW(sharded.parameters(), lr=0.05))
        return {"model": sharded, "optim": optim}

    return build


def train(
    manager: eg.QuorumManager,
    state: Any,
    seen: Seen,
    num_steps: int,
    before_vote: Callable[[Step], None],
    on_commit: Callable[[Step, float], None],
) -> dict[str, Part]:
    """All steps. `before_vote`: called in each step; `on_commit`: with its loss. Returns this rank's parts of the
    parameters and of what AdamW keeps of them; nothing if this rank has not committed the last step."""
    batches = eg.GlobalBatch(NUM_SAMPLES, size=8, slot=2, seed=5)
    inputs, targets = data()
    result: dict[str, Part] = {}
    for step in manager.steps(num_steps):
        with step:
            slots, total = batches.slots(step), torch.zeros((), dtype=torch.float64)
            for slot in slots:
                with state.model.accumulate(last=slot.last):
                    loss = (state.model(inputs[slot.index]) - targets[slot.index]).square().sum()
                    loss.backward()
                total += loss.detach()
            before_vote(step)
            seen.indices = [*seen.indices, step.index]
            if state.optim.step(weight=slots.num_samples, max_norm=0.5, sums={"loss": total}):
                on_commit(step, state.optim.sums["loss"])
                if step.index == num_steps - 1:
                    result = {name: part_of(value) for name, value in state.model.module.named_parameters()}
                    moments = state.optim.optim.state.values()
                    result |= {
                        f"{key}.{index}": part_of(value)
                        for index, of_parameter in enumerate(moments)
                        for key, value in of_parameter.items()
                    }
    return result


def main() -> None:
    here, sdp, num_steps, every = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    manager = eg.join(layout=eg.ParallelLayout(sdp=sdp))
    state, seen = manager.build(builder(manager)), Seen()
    manager.register_state(seen=seen)
    manager.checkpoints(every_steps=every)

    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def before_vote(step: Step) -> None:
        while held(here / "hold") == step.index or not (manager.num_members == num_ranks or manager.join_noticed):
            step.check()
            time.sleep(0.01)

    def on_commit(step: Step, loss: float) -> None:
        with open(here / f"steps-{os.getpid()}", "a") as file:
            file.write(f"{step.index} {loss!r}\n")

    result = train(manager, state, seen, num_steps, before_vote, on_commit)
    assert seen.indices == list(range(num_steps)), seen.indices
    (here / f"done-{os.environ.get('LOCAL_RANK', '0')}").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
