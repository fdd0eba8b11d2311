"""A small model whose parameters divide badly, trained with `reduction="reproducible"` in a layout of `sdp`. Run by
`test_sdp_bits.py`, which compares the bits of different layouts.

It has tied and frozen parameters, rows that 2 and 4 ranks cannot divide equally, and fewer rows than 4 ranks. Twelve
slots are no power of two.
"""

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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

import elasticgang as eg
from scripts.demo_job.row_digest import digest_of_rows

VOCABULARY, WIDTH, HIDDEN, LENGTH, NUM_SAMPLES = 13, 7, 5, 6, 30
STEPS, MAX_NORM = 6, 3.0
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.02),
}
POLICIES = {
    "float32": MixedPrecisionPolicy(),
    "bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "rounded": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.gains = nn.Parameter(torch.rand(3))  # fewer than four ranks
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        first, second, third = self.gains
        mixed: Tensor = first * hidden + self.down(torch.tanh(second * self.up(hidden))) + third * self.fixed(hidden)
        return mixed


class Model(nn.Module):
    def __init__(self, *, repeats: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.output.weight = self.embedding.weight
        self.rounds = 2 if repeats else 1

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in [*self.layers] * self.rounds:
            hidden = layer(hidden)
        logits: Tensor = self.output(hidden)
        return logits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw")
    parser.add_argument("--policy", choices=list(POLICIES), default="float32")
    parser.add_argument("--reduction", default="reproducible")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--repeats", action="store_true", help="each layer is called twice in a forward")
    parser.add_argument("--twice", action="store_true", help="two backwards in a slot")
    parser.add_argument("--adds", action="store_true", help="`fully_shard` adds the slots, and reduces in the last one")
    parser.add_argument("--plain", action="store_true", help="without `fully_shard`")
    parser.add_argument("--leave-out", action="store_true", help="some parameters are not sharded")
    parser.add_argument("--kill", type=int, metavar="STEP", help="the last rank dies once, after backward")
    args = parser.parse_args()
    torch.set_num_threads(1)
    manager = eg.join()

    def build(seat: eg.ModelCoordinates) -> dict[str, object]:
        model = Model(repeats=args.repeats)
        if not args.plain:
            policy, mesh = POLICIES[args.policy], manager.gangs.device_mesh("sdp")
            for layer in model.layers:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            if not args.leave_out:
                fully_shard(model, mesh=mesh, mp_policy=policy)
        sharded = eg.ShardedDataParallel(manager, model, reduction=args.reduction, keep=args.keep)
        trained = [each for each in sharded.parameters() if each.requires_grad]
        return {"model": sharded, "optim": eg.Optimizer(manager, OPTIMIZERS[args.optimizer](trained))}

    state = manager.build(build)
    samples = torch.randint(VOCABULARY, (NUM_SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(4))
    batches = eg.GlobalBatch(NUM_SAMPLES, size=12, slot=1, seed=5)
    killed = args.output.with_suffix(".killed")
    is_last = os.environ.get("LOCAL_RANK") == str(int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1)
    for step in manager.steps(STEPS):
        with step:
            slots = batches.slots(step)
            for slot in slots:
                with state.model.accumulate(last=slot.last):
                    if args.adds:
                        state.model.module.set_requires_gradient_sync(slot.last)
                    for _ in range(2 if args.twice else 1):
                        tokens = samples[slot.index]
                        logits = state.model(tokens[:, :-1]).float().flatten(0, 1)
                        loss = functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
                        loss.backward()  # type: ignore[no-untyped-call]
            if is_last and step.index == args.kill and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            state.optim.step(weight=slots.num_samples, max_norm=MAX_NORM)

    part = manager.gangs.sdp.rank
    digest = digest_of_rows(state.model.named_parameters())
    with args.output.open("a") as file:  # one write for each rank
        file.write(json.dumps({"part": part, "sdp": manager.layout.sdp, "digest": digest}) + "\n")


if __name__ == "__main__":
    main()
