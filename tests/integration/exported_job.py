"""A training job with tied weights and a buffer that is not persistent, in any layout, which leaves a checkpoint.

`python exported_job.py DIRECTORY LAYOUT`. With OWN_NAMES in the environment, a stage numbers its own blocks from 0, and
`names` says what they are in the model. Double precision, so that only the order of summation differs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import elasticgang as eg

WIDTH, NUM_BLOCKS, NUM_STEPS, SLOT = 4, 2, 3, 2


class Block(nn.Module):
    """`down` has the weight of `up`."""

    scale: Tensor
    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
        self.tie()
        self.register_buffer("scale", torch.full((2,), 0.5, dtype=torch.float64))
        self.register_buffer("cache", torch.ones(3, dtype=torch.float64), persistent=False)

    def tie(self) -> None:
        self.down.weight = self.up.weight

    def forward(self, hidden: Tensor) -> Tensor:
        changed: Tensor = self.scale[0] * self.down(torch.tanh(self.up(hidden))) * self.cache[0]
        return hidden + changed


class Model(nn.Module):
    """Those of the blocks that have these numbers in the whole model."""

    def __init__(self, numbers: Iterable[int] = range(NUM_BLOCKS), first: int = 0) -> None:
        """`first`: the number that is 0 here."""
        super().__init__()
        torch.manual_seed(7)
        blocks = [Block() for _ in range(NUM_BLOCKS)]
        self.blocks = nn.ModuleDict({str(number - first): blocks[number] for number in numbers})

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks.values():
            hidden = block(hidden)
        return hidden


def loss_sum(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().sum()


def main() -> None:
    directory, layout, has_own_names = Path(sys.argv[1]), sys.argv[2], "OWN_NAMES" in os.environ
    torch.set_num_threads(1)
    manager = eg.join(layout=eg.ParallelLayout.parse(layout))
    sizes = manager.layout
    meta = torch.empty(SLOT, WIDTH, dtype=torch.float64, device="meta")

    def numbers(stage: int) -> range:
        return range(NUM_BLOCKS * stage // sizes.pp, NUM_BLOCKS * (stage + 1) // sizes.pp)

    def build(seat: eg.ModelCoordinates) -> dict[str, object]:
        own = numbers(seat.pp)
        module = Model(own, own.start if has_own_names else 0)
        mesh = manager.gangs.device_mesh("sdp", "tp")
        for block in module.blocks.values() if sizes.tp > 1 else ():
            assert isinstance(block, Block)
            for layer in (block.up, block.down):
                parallelize_module(layer, mesh["tp"], ColwiseParallel(output_layouts=Replicate()), src_data_rank=None)
            block.tie()
        for part in (*module.blocks.values(), module) if sizes.sdp > 1 else ():
            fully_shard(part, mesh=mesh["sdp"])
        if sizes.pp > 1:
            model: Any = eg.PipelineParallel(manager, module, inputs=meta, outputs=meta, loss_sum=loss_sum)
        else:
            model = eg.ShardedDataParallel(manager, module)
        return {"model": model, "optim": eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))}

    def name(seat: eg.ModelCoordinates, own: str) -> str:
        head, found, rest = own.partition("blocks.")
        number, _, tail = rest.partition(".")
        return f"{head}blocks.{int(number) + numbers(seat.pp).start}.{tail}" if found else own

    state = manager.build(build, names=name if has_own_names else None)
    manager.checkpoints(directory, every_steps=NUM_STEPS)
    batches = eg.GlobalBatch(32, size=8, slot=SLOT, seed=5)
    inputs = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    targets = inputs.flip(1)
    for step in manager.steps(NUM_STEPS):
        with step:
            slots = batches.slots(step)
            if sizes.pp > 1:
                index = torch.cat([slot.index for slot in slots]) if slots else torch.empty(0, dtype=torch.int64)
                state.model.run(slots, inputs[index], targets[index])
            for slot in slots if sizes.pp == 1 else ():
                with state.model.accumulate(last=slot.last):
                    loss = loss_sum(state.model(inputs[slot.index]), targets[slot.index])
                    loss.backward()  # type: ignore[no-untyped-call]
            state.optim.step(weight=slots.num_samples)


if __name__ == "__main__":
    main()
