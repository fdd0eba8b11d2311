"""A training job with checkpoints whose model `fully_shard` divides over `sdp`. In double precision, so that only the
order of summation differs between numbers of ranks.

`python resumed_sharded_job.py DIRECTORY SDP STEPS EVERY`. It appends each committed step and its loss to
`steps-PID`, and writes `done-LOCAL_RANK` with its parameters and what AdamW keeps of them, whole. It waits in the
step that stands in the file `hold`, while that is there.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import elasticgang as eg
from tests.chaos.resumed_job import Seen, held

NUM_SAMPLES, WIDTH, HIDDEN = 37, 6, 9  # neither divides by 4


class Model(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.up = nn.Linear(WIDTH, HIDDEN, dtype=torch.float64)
        self.down = nn.Linear(HIDDEN, WIDTH, dtype=torch.float64)
        self.register_buffer("scale", torch.full((2,), 0.5, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(inputs)))
        result: Tensor = inputs + self.scale[0] * self.down(hidden)
        return result


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(NUM_SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, inputs.flip(1).tanh()


def whole(value: Tensor) -> list[float]:
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return [float(each) for each in full.detach().flatten()]


def main() -> None:
    here, sdp, num_steps, every = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    manager = eg.join(layout=eg.ParallelLayout(sdp=sdp))

    def build(seat: eg.ModelCoordinates) -> dict[str, object]:
        mesh = manager.gangs.device_mesh("sdp")
        model = Model()
        for part in (model.up, model.down, model):
            fully_shard(part, mesh=mesh)
        sharded = eg.ShardedDataParallel(manager, model)
        optim = eg.Optimizer(manager, torch.optim.AdamW(sharded.parameters(), lr=0.05))
        return {"model": sharded, "optim": optim}

    state, seen = manager.build(build), Seen()
    manager.register_state(seen=seen)
    manager.checkpoints(every_steps=every)
    batches = eg.GlobalBatch(NUM_SAMPLES, size=8, slot=2, seed=5)
    inputs, targets = data()
    result: dict[str, list[float]] = {}
    for step in manager.steps(num_steps):
        with step:
            slots, total = batches.slots(step), torch.zeros((), dtype=torch.float64)
            for slot in slots:
                with state.model.accumulate(last=slot.last):
                    loss = (state.model(inputs[slot.index]) - targets[slot.index]).square().sum()
                    loss.backward()
                total += loss.detach()
            while held(here / "hold") == step.index:
                step.check()
                time.sleep(0.01)
            seen.indices = [*seen.indices, step.index]
            if state.optim.step(weight=slots.num_samples, max_norm=0.5):
                loss_sum = eg.all_sum(manager.gangs.dp, total).item()
                with open(here / f"steps-{os.getpid()}", "a") as file:
                    file.write(f"{step.index} {loss_sum!r}\n")
                if step.index == num_steps - 1:
                    result = {name: whole(value) for name, value in state.model.module.named_parameters()}
                    moments = state.optim.optim.state.values()
                    result |= {
                        f"{key}.{index}": whole(value)
                        for index, of_parameter in enumerate(moments)
                        for key, value in of_parameter.items()
                    }
    assert seen.indices == list(range(num_steps)), seen.indices
    (here / f"done-{os.environ.get('LOCAL_RANK', '0')}").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
