"""A training job with what models and optimizers have beside plain parameters: tied weights, a frozen layer, parameter
groups with options of their own, an average of the weights (EMA), and any optimizer of OPTIMIZERS. With "scaled" in its
name, the losses are scaled, and some overflow in the backward of one slot.

With `--sdp 2` the model is divided by `fully_shard`; its 9 rows leave an uneven shard. Everything is in double
precision, so that the run of one process differs by the order of summation alone. Faults are as of `job.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import elasticgang as eg
from elasticgang.state.dtensor import local
from tests.chaos.job import INIT_SCALE, Faults, History

NUM_SAMPLES, BATCH_SIZE, SLOT, SEED = 37, 16, 2, 5
TOKENS, WIDTH = 9, 6
EMA_DECAY = 0.75
OVERFLOWING = (1, 4, 8)  # steps
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "sgd, scaled": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.02),
    "adamw, fused": partial(torch.optim.AdamW, lr=0.02, fused=True),
    "adamw, foreach": partial(torch.optim.AdamW, lr=0.02, foreach=True),
    "adafactor": partial(torch.optim.Adafactor, lr=0.05),
    "adafactor, foreach": partial(torch.optim.Adafactor, lr=0.05, foreach=True),
}


class Model(nn.Module):
    """Reads tokens with the weights by which it writes them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(TOKENS, WIDTH, dtype=torch.float64)
        self.frozen = nn.Linear(WIDTH, WIDTH, dtype=torch.float64).requires_grad_(False)
        self.hidden = nn.Linear(WIDTH, TOKENS, dtype=torch.float64)
        self.back = nn.Linear(TOKENS, WIDTH, dtype=torch.float64)
        self.output = nn.Linear(WIDTH, TOKENS, bias=False, dtype=torch.float64)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.frozen(self.embedding(tokens)))
        result: Tensor = self.output(hidden + self.back(torch.tanh(self.hidden(hidden))))
        return result


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    vectors, matrices = ([each for each in trained if (each.dim() > 1) == is_matrix] for is_matrix in (False, True))
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.01, "weight_decay": 0.0}]


def average(ema: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for mean, parameter in zip(ema.parameters(), model.parameters(), strict=True):
            mean.lerp_(parameter, 1 - EMA_DECAY)


def state_of(model: nn.Module, ema: nn.Module, optim: torch.optim.Optimizer) -> dict[str, list[float]]:
    """This rank's part of everything that is trained."""
    tensors = {f"model.{name}": value for name, value in model.named_parameters()}
    tensors |= {f"ema.{name}": value for name, value in ema.named_parameters()}
    for index, of_parameter in optim.state_dict()["state"].items():
        tensors |= {f"{key}.{index}": value for key, value in of_parameter.items() if value is not None}
    return {name: local(value).flatten().tolist() for name, value in tensors.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--sdp", type=int, default=0, help="ranks that divide the model; 0: each has all of it")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--checkpoints", type=Path, help="save the state here after the last step, and go on from here")
    parser.add_argument("--faults", type=json.loads, default=[])
    args = parser.parse_args()
    torch.set_num_threads(1)
    faults = Faults(args.output_dir, args.faults, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    manager = eg.join(layout=eg.ParallelLayout(sdp=max(args.sdp, 1)))
    faults.install(manager)

    is_scaled = "scaled" in args.optimizer

    def build(seat: eg.ModelCoordinates) -> dict[str, object]:
        module, ema = Model(), Model().requires_grad_(False)
        if args.sdp:
            mesh = manager.gangs.device_mesh("sdp")
            for each in (module, ema):
                fully_shard(each, mesh=mesh)
            model: nn.Module = eg.ShardedDataParallel(manager, module)
        else:
            model = eg.DistributedDataParallel(manager, module)
        scaler = torch.amp.GradScaler("cpu", init_scale=INIT_SCALE, growth_interval=3, enabled=is_scaled)
        optim = eg.Optimizer(manager, OPTIMIZERS[args.optimizer](groups_of(module)), scaler=scaler)
        return {"model": model, "ema": ema, "optim": optim, "scaler": scaler}

    state = manager.build(build)
    if args.checkpoints is not None:
        manager.checkpoints(args.checkpoints, every_steps=1000)
    batches = eg.GlobalBatch(NUM_SAMPLES, size=BATCH_SIZE, slot=SLOT, seed=SEED)
    tokens = torch.randint(TOKENS, (NUM_SAMPLES, 2), generator=torch.Generator().manual_seed(SEED))
    history = History(args.output_dir / "history", manager.member)
    for step in manager.steps(args.steps):
        with step:
            faults.at("step")
            faults.wait_for_company()
            slots, losses = batches.slots(step), []
            for slot in slots:
                with state.model.accumulate(last=slot.last):
                    read, written = tokens[slot.index].unbind(1)
                    loss = nn.functional.cross_entropy(state.model(read), written, reduction="sum")
                    losses.append(loss.item())
                    if is_scaled and step.index in OVERFLOWING and slot.number == 3:
                        loss = loss * math.inf
                    state.scaler.scale(loss).backward()
            faults.at("body")
            history.write("prepared", step=step.index, generation=step.generation, loss=sum(losses))
            if state.optim.step(weight=slots.num_samples, max_norm=0.5):
                average(state.ema, state.model.module)
                assert manager.tip is not None
                history.write("committed", step=step.index, generation=manager.tip.generation)
    model = state.model.module
    assert model.output.weight is model.embedding.weight
    values = state_of(model, state.ema, state.optim.optim)
    if is_scaled:
        values["step.scale"] = [state.scaler.get_scale()]
    history.write("finished", part=manager.gangs.sdp.rank, state=values)
    faults.finish()


if __name__ == "__main__":
    main()
