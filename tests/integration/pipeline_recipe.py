"""A model of two stages, which may depend on torch's random numbers by dropout. Run by `test_pipeline.py` as a pipeline
of one or more replica groups, and alone. Double precision, so that only the order of summation differs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn

import elasticgang as eg

WIDTH, NUM_SAMPLES, BATCH_SIZE, STEPS = 6, 24, 4, 5


def stages(dropout: float) -> list[nn.Module]:
    torch.manual_seed(7)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Tanh(), nn.Dropout(dropout)) for _ in range(2)
    ]


def loss_sum(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().sum()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(NUM_SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, inputs.flip(1).tanh()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--slot", type=int, required=True)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    manager = eg.join(layout=eg.ParallelLayout(pp=args.pp))
    meta = torch.empty(args.slot, WIDTH, dtype=torch.float64, device="meta")

    def build(seat: eg.ModelCoordinates) -> dict[str, object]:
        model: eg.ShardedDataParallel
        if args.pp > 1:
            stage = stages(args.dropout)[seat.pp]
            model = eg.PipelineParallel(manager, stage, inputs=meta, outputs=meta, loss_sum=loss_sum)
        else:
            model = eg.ShardedDataParallel(manager, nn.Sequential(*stages(args.dropout)))
        return {"model": model, "optim": eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))}

    state = manager.build(build)
    batches = eg.GlobalBatch(NUM_SAMPLES, size=BATCH_SIZE, slot=args.slot, seed=3)
    inputs, targets = data()
    losses: dict[int, float] = {}
    for step in manager.steps(STEPS):
        with step:
            slots = batches.slots(step)
            if args.pp > 1:
                index = torch.cat([slot.index for slot in slots]) if slots else torch.empty(0, dtype=torch.int64)
                found = state.model.run(slots, inputs[index], targets[index])
            else:
                found = []
                for slot in slots:
                    with state.model.accumulate(last=slot.last):
                        loss = loss_sum(state.model(inputs[slot.index]), targets[slot.index])
                        loss.backward()  # type: ignore[no-untyped-call]
                    found.append(loss.detach())
            total = torch.stack([torch.zeros((), dtype=torch.float64), *found]).sum()
            if state.optim.step(weight=slots.num_samples):
                losses[step.index] = eg.all_sum(manager.gangs.root, total).item()
    whole = [value.detach().flatten().tolist() for value in state.model.module.parameters()]
    with args.output.open("a") as file:
        file.write(json.dumps({"stage": manager.gangs.pp.rank, "losses": losses, "parameters": whole}) + "\n")


if __name__ == "__main__":
    main()
