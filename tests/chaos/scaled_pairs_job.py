"""A job in pairs (`tp=2`) with scaled gradients, of which those of one rank of the pair overflow in some steps.

The gradient of a weight is the mean of small integers, and the scale is a power of two, so that the result is exact.
Faults are as of `job.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path

import torch
from torch import Tensor, nn

import elasticgang as eg
from tests.chaos.job import BATCH_SIZE, INIT_SCALE, NUM_SAMPLES, SEED, SLOT, Faults, History, overflows

LR = 0.125
WIDTH = 4


class Half(nn.Module):
    """One rank's half. The gradient of `weight[i]` is the sum of (sample + i) over samples, and twice that of the other
    rank of the pair."""

    def __init__(self, seat: eg.ModelCoordinates) -> None:
        super().__init__()
        self.factor = 1 + seat.tp
        self.weight = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, index: Tensor) -> Tensor:
        return self.factor * (self.weight * (index[:, None] + torch.arange(WIDTH))).sum()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--faults", type=json.loads, default=[])
    parser.add_argument("--max-norm", type=float)
    args = parser.parse_args()
    torch.set_num_threads(1)
    faults = Faults(args.output_dir, args.faults, int(os.environ["LOCAL_WORLD_SIZE"]))
    manager = eg.join(layout=eg.ParallelLayout(tp=2))
    faults.install(manager)

    def build(seat: eg.ModelCoordinates) -> dict[str, object]:
        model = eg.DistributedDataParallel(manager, Half(seat))
        scaler = torch.amp.GradScaler("cpu", init_scale=INIT_SCALE, growth_interval=3)
        optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=LR), scaler=scaler)
        return {"model": model, "optim": optim, "scaler": scaler}

    state = manager.build(build)
    batches = eg.GlobalBatch(NUM_SAMPLES, size=BATCH_SIZE, slot=SLOT, seed=SEED)
    history = History(args.output_dir / "history", manager.member)
    for step in manager.steps(args.steps):
        with step:
            faults.at("step")
            faults.wait_for_company()
            slots = batches.slots(step)
            for slot in slots:
                with state.model.accumulate(last=slot.last):
                    loss = state.model(slot.index)
                    if overflows(step.index) and slot.number == 1 and manager.gangs.tp.rank == 1:
                        loss = loss * math.inf
                    state.scaler.scale(loss).backward()
            faults.at("body")
            state.optim.step(weight=slots.num_samples, max_norm=args.max_norm)
    weight = state.model.module.weight.tolist()
    history.write("finished", part=manager.gangs.tp.rank, weight=weight, scaler=state.scaler.state_dict())
    faults.finish()


if __name__ == "__main__":
    main()
