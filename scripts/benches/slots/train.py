"""Train a small model with a lot of work in each slot, and write down when each slot begins.

Run by `long_steps.py`; the history also has what `demo_job/run_log.py` reads. In a layout each rank holds a part of the
model: by FSDP2 over `sdp`, by `parallelize_module` over `tp`, or a stage of a pipeline over `pp`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import elasticgang as eg
from elasticgang.train import Slots
from scripts.demo_job.train import History

WIDTH, NUM_SAMPLES, SLOT = 256, 4096, 64


class Deep(nn.Module):
    """Two linear layers, applied in turn many times. `num_pairs`: how many times."""

    def __init__(self, num_pairs: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.num_pairs = num_pairs
        self.on_forward: Callable[[], object] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.on_forward()
        for _ in range(self.num_pairs):
            x = torch.tanh(self.down(torch.tanh(self.up(x))))
        return x


def loss_sum(output: Tensor, targets: Tensor) -> Tensor:
    return output.square().sum()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--depth", type=int, required=True)
    parser.add_argument("--reduction", required=True)
    parser.add_argument("--keep", action="store_true")
    for axis in ("pp", "sdp", "tp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    layout = eg.ParallelLayout(pp=args.pp, sdp=args.sdp, tp=args.tp)
    manager = eg.join(layout=layout)

    def build(seat: eg.ModelCoordinates) -> dict[str, object]:
        deep = Deep(args.depth // 2 // layout.pp)
        deep.on_forward = slot_begins
        if layout.tp > 1:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(deep, manager.gangs.device_mesh("tp"), plan, src_data_rank=None)
        if layout.sdp > 1:
            fully_shard(deep, mesh=manager.gangs.device_mesh("sdp"))
        if layout.pp > 1:
            meta = torch.empty(SLOT, WIDTH, device="meta")
            model: nn.Module = eg.PipelineParallel(
                manager, deep, inputs=meta, outputs=meta, loss_sum=loss_sum, keep=args.keep
            )
        elif layout.unit > 1:
            model = eg.ShardedDataParallel(manager, deep, reduction=args.reduction, keep=args.keep)
        else:
            model = eg.DistributedDataParallel(manager, deep, reduction=args.reduction, keep=args.keep)
        optim = eg.Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=1e-3))
        return {"model": model, "optim": optim}

    numbers: Iterator[int] = iter(())  # of the slots of the step under way

    def slot_begins() -> None:
        step = manager.step
        history.write(
            "slot", step=step.index, generation=step.generation, group=manager.gangs.rdp.rank, slot=next(numbers)
        )

    history = History(str(args.output_dir), manager.member)
    state = manager.build(build)
    data = torch.randn(NUM_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(args.seed))
    batches = eg.GlobalBatch(NUM_SAMPLES, size=args.slots * SLOT, slot=SLOT, seed=args.seed)
    for step in manager.steps(args.steps):
        with step:
            slots = batches.slots(step)
            numbers = iter([slot.number for slot in slots])
            if layout.pp > 1:
                run_pipeline(state.model, slots, data)
            else:
                run_slots(state.model, slots, data)
            gangs = manager.gangs
            part = {"part": [gangs.pp.rank, gangs.sdp.rank, gangs.tp.rank]} if layout.unit > 1 else {}
            share = {"loss_sum": 0.0, "tokens": slots.num_samples, "active": manager.num_active, "samples": [], **part}
            history.write("prepared", step=step.index, generation=step.generation, **share)
            if state.optim.step(weight=slots.num_samples):
                assert manager.tip is not None
                history.write("committed", step=step.index, generation=manager.tip.generation, **part)


def run_slots(model: eg.ShardedDataParallel, slots: Slots, data: Tensor) -> None:
    for slot in slots:
        with model.accumulate(last=slot.last):
            model(data[slot.index]).square().sum().backward()


def run_pipeline(model: eg.PipelineParallel, slots: Slots, data: Tensor) -> None:
    samples = torch.cat([data[slot.index] for slot in slots]) if len(slots) else data[:0]
    model.run(slots, samples, samples)


if __name__ == "__main__":
    main()
