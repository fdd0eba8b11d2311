"""The job of docs/layouts.md for a layout in which ranks hold parts of the model, made whole: two layers split over
`tp` by torch's `parallelize_module`, norms outside of them, all of it sharded over `sdp` by `fully_shard`. Run by
`test_layout_recipe.py` as `sdp=2, tp=2`, and alone. Double precision, so that only the order of summation differs."""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import elasticgang as eg

WIDTH, HIDDEN, NUM_SAMPLES, STEPS = 4, 8, 24, 6
MAX_NORM = 0.5  # less than the norm in some of the steps
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.2, momentum=0.9),  # each step's length shows in it
    "adamw": partial(torch.optim.AdamW, lr=0.05),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, dtype=torch.float64) for _ in range(2))
        self.up = nn.Linear(WIDTH, HIDDEN, dtype=torch.float64)
        self.down = nn.Linear(HIDDEN, WIDTH, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norms[0](inputs)
        result: Tensor = self.norms[1](hidden + self.down(torch.tanh(self.up(hidden))))
        return result


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(NUM_SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, inputs.flip(1).tanh()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sdp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--kill", type=int, metavar="STEP", help="the last rank dies once, when this step is reduced")
    args = parser.parse_args()
    torch.set_num_threads(1)
    manager = eg.join(layout=eg.ParallelLayout(sdp=args.sdp, tp=args.tp))

    def build(seat: eg.ModelCoordinates) -> dict[str, object]:
        mesh = manager.gangs.device_mesh("sdp", "tp")
        model = Model()
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
        fully_shard(model, mesh=mesh["sdp"])
        sharded = eg.ShardedDataParallel(manager, model)
        optim = OPTIMIZERS[args.optimizer](sharded.parameters())
        return {"model": sharded, "optim": eg.Optimizer(manager, optim, replicated={"tp": model.norms.parameters()})}

    state = manager.build(build)
    batches = eg.GlobalBatch(NUM_SAMPLES, size=16, slot=2, seed=3)
    inputs, targets = data()
    losses: dict[int, float] = {}
    parameters: dict[int, dict[str, list[float]]] = {}  # by step: those that it begins with
    for step in manager.steps(STEPS):
        with step:
            named = state.model.module.named_parameters() if step.share is not None else ()
            at_first = {name: whole(value) for name, value in named}  # collectives, before the vote
            slots = batches.slots(step)
            total = torch.zeros((), dtype=torch.float64)
            for slot in slots:
                with state.model.accumulate(last=slot.last):
                    loss = (state.model(inputs[slot.index]) - targets[slot.index]).square().sum()
                    loss.backward()
                total += loss.detach()
            if (
                step.index == args.kill
                and manager.gangs.root.rank == 3
                and not (killed := Path(f"{args.output}.killed")).exists()
            ):
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            own = total if manager.gangs.tp.rank == 0 else 0.0  # all ranks of a tp gang know the same loss
            if state.optim.step(weight=slots.num_samples, max_norm=MAX_NORM, sums={"loss": own}):
                losses[step.index] = state.optim.sums["loss"]
                parameters[step.index] = at_first
    with args.output.open("a") as file:
        file.write(json.dumps({"losses": losses, "parameters": parameters}) + "\n")


def whole(parameter: Tensor) -> list[float]:
    value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return [float(each) for each in value.detach().flatten()]


if __name__ == "__main__":
    main()
