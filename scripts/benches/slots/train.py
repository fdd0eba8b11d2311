"""Train a small model with a lot of work in each slot, and write down when each slot begins.

Run by `long_steps.py`; the history also has what `demo_job/run_log.py` reads.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import elasticgang as eg
from scripts.demo_job.train import History

WIDTH, NUM_SAMPLES, SLOT = 256, 4096, 64


class Deep(nn.Module):
    """One linear layer, applied many times."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.depth = depth

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.depth):
            x = torch.tanh(self.layer(x))
        return x


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--depth", type=int, required=True)
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    manager = eg.join(layout=eg.ParallelLayout())
    model = eg.DistributedDataParallel(manager, Deep(args.depth), reduction="reproducible", keep=args.keep)
    optim = eg.Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=1e-3))
    manager.register_state(model=model, optim=optim)
    data = torch.randn(NUM_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(args.seed))
    batches = eg.GlobalBatch(NUM_SAMPLES, size=args.slots * SLOT, slot=SLOT, seed=args.seed)
    history = History(str(args.output_dir), manager.member)
    for step in manager.steps(args.steps):
        with step:
            slots = batches.slots(step)
            for slot in slots:
                with model.accumulate(last=slot.last):
                    history.write("slot", step=step.index, generation=step.generation, slot=slot.number)
                    model(data[slot.index]).square().sum().backward()
            share = {"loss_sum": 0.0, "tokens": slots.num_samples, "active": manager.num_active, "samples": []}
            history.write("prepared", step=step.index, generation=step.generation, **share)
            if optim.step(weight=slots.num_samples):
                assert manager.tip is not None
                history.write("committed", step=step.index, generation=manager.tip.generation)


if __name__ == "__main__":
    main()
