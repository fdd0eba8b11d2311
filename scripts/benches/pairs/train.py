"""Train a small model in pairs (`tp=2`): two linear layers, split over the pair, with its sums in forward and backward.

Run by `repair.py`; writes the history that `demo_job/run_log.py` reads.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import elasticgang as eg
from scripts.demo_job.train import History

WIDTH, HIDDEN, NUM_SAMPLES = 32, 128, 4096


class Shared(torch.autograd.Function):
    """The input on both ranks; their gradients of it are summed."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gang: eg.Gang) -> Tensor:
        ctx.gang = gang
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        summed = grads[0].clone()
        ctx.gang.all_reduce(summed, eg.ReduceOperation.SUM)
        return summed, None


class Summed(torch.autograd.Function):
    """The sum of both ranks' parts."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gang: eg.Gang) -> Tensor:
        summed = tensor.clone()
        gang.all_reduce(summed, eg.ReduceOperation.SUM)
        return summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Half(nn.Module):
    """One rank's half of the model."""

    def __init__(self, seat: eg.ModelCoordinates, gang: eg.Gang) -> None:
        super().__init__()
        self._gang = gang
        torch.manual_seed(0)
        whole_up, whole_down = torch.randn(HIDDEN, WIDTH) / 8, torch.randn(WIDTH, HIDDEN) / 16
        self.up = nn.Parameter(whole_up.chunk(2, 0)[seat.tp].clone())
        self.down = nn.Parameter(whole_down.chunk(2, 1)[seat.tp].clone())

    def forward(self, x: Tensor) -> Tensor:
        shared = Shared.apply(x, self._gang)  # type: ignore[no-untyped-call]
        part = torch.tanh(shared @ self.up.T) @ self.down.T
        summed: Tensor = Summed.apply(part, self._gang)  # type: ignore[no-untyped-call]
        return summed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    manager = eg.join(layout=eg.ParallelLayout(tp=2))

    def build(seat: eg.ModelCoordinates) -> dict[str, object]:
        model = eg.DistributedDataParallel(manager, Half(seat, manager.gangs.tp))
        return {"model": model, "optim": eg.Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=1e-3))}

    state = manager.build(build)
    data = torch.randn(NUM_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(args.seed))
    batches = eg.GlobalBatch(NUM_SAMPLES, size=8, slot=4, seed=args.seed)
    history = History(str(args.output_dir), manager.member)
    for step in manager.steps(args.steps):
        with step:
            slots, loss_sum = batches.slots(step), 0.0
            for slot in slots:
                with state.model.accumulate(last=slot.last):
                    sample = data[slot.index]
                    loss = (state.model(sample) - sample.flip(1)).square().sum()
                    loss.backward()
                    loss_sum += loss.item()
            share = {"loss_sum": loss_sum, "tokens": slots.num_samples, "active": manager.num_active, "samples": []}
            history.write("prepared", step=step.index, generation=step.generation, **share)
            if state.optim.step(weight=slots.num_samples):
                assert manager.tip is not None
                history.write("committed", step=step.index, generation=manager.tip.generation)


if __name__ == "__main__":
    main()
