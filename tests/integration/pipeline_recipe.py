"""A model of two stages or more, which may depend on torch's random numbers by dropout. Run by `test_pipeline.py` as a
pipeline of one or more replica groups, and alone. Double precision, so that only the order of summation differs.

`--loader`: the samples come from worker processes, of a dataset or of streams.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import elasticgang as eg
from elasticgang.gang import ElasticGang

WIDTH, NUM_SAMPLES, BATCH_SIZE, STEPS = 6, 24, 4, 5
NUM_SPLITS = 8


def stages(dropout: float, num: int = 2, *, tied: bool = False) -> list[nn.Module]:
    """`tied`: the first and the last one have the same weight."""
    torch.manual_seed(7)
    linear = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(num)]
    if tied:
        linear[-1].weight = linear[0].weight
    return [nn.Sequential(each, nn.Tanh(), nn.Dropout(dropout)) for each in linear]


def loss_sum(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().sum()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(NUM_SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, inputs.flip(1).tanh()


class Shard:
    """A split: every `NUM_SPLITS`-th sample."""

    def __init__(self, number: int) -> None:
        inputs, targets = data()
        self._samples = list(zip(inputs[number::NUM_SPLITS], targets[number::NUM_SPLITS], strict=True))
        self._place = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self._place < len(self._samples):
            self._place += 1
            yield self._samples[self._place - 1]
        self._place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self._place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._place = state["place"]


def make_loader(manager: eg.QuorumManager, kind: str, slot: int) -> Any:
    if kind == "stream":
        return eg.StreamLoader(manager, Shard, num_splits=NUM_SPLITS, size=BATCH_SIZE, slot=slot, num_workers=1)
    batches = eg.GlobalBatch(NUM_SAMPLES, size=BATCH_SIZE, slot=slot, seed=3)
    return eg.DataLoader(TensorDataset(*data()), batches, num_workers=1)


def num_of(gang: eg.Gang) -> int:
    return gang.num_started if isinstance(gang, ElasticGang) else 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--slot", type=int, required=True)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--tied", action="store_true", help="one weight in two stages, and clipped gradients")
    parser.add_argument(
        "--tied-otherwise", choices=["names", "none", "twice", "values"], help="as scripts do by mistake"
    )
    parser.add_argument("--num-stages", type=int, default=2)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--loader", choices=["dataset", "stream"], default="dataset")
    parser.add_argument("--kill", type=int, metavar="STEP", help="the last rank dies once, when this step is reduced")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    manager = eg.join(layout=eg.ParallelLayout(pp=args.pp))
    meta = torch.empty(args.slot, WIDTH, dtype=torch.float64, device="meta")

    loader = make_loader(manager, args.loader, args.slot)

    def build(seat: eg.ModelCoordinates) -> dict[str, object]:
        model: eg.ShardedDataParallel
        if args.pp > 1:
            stage = stages(args.dropout, args.num_stages, tied=args.tied)[seat.pp]
            tied: dict[str, tuple[int, ...]] = {"0.weight": (0, args.pp - 1)} if args.tied else {}
            match args.tied_otherwise:
                case "names":
                    tied = {"0.weight": (seat.pp,)}
                case "none" if seat.pp:
                    tied = {}
                case "twice":
                    stage.register_parameter("same", stage.get_parameter("0.weight"))
                    tied["same"] = (0, args.pp - 1)
                case "values" if seat.pp:
                    torch.nn.init.zeros_(stage.get_parameter("0.weight"))
            model = eg.PipelineParallel(
                manager, stage, inputs=meta, outputs=meta, loss_sum=loss_sum, keep=args.keep, tied=tied
            )
        else:
            model = eg.ShardedDataParallel(
                manager, nn.Sequential(*stages(args.dropout, args.num_stages, tied=args.tied))
            )
        optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
        return {"model": model, "optim": optim, **({"stream": loader} if args.loader == "stream" else {})}

    state = manager.build(build)
    losses: dict[int, float] = {}
    known: dict[tuple[int, int], Tensor] = {}  # on the last stage, by step and slot
    num_started = 0  # by the pipeline, in the last step
    for step in manager.steps(STEPS):
        with step:
            slots = loader.slots(step)
            if args.pp > 1:
                batches = slots.load()
                parts = map(torch.cat, zip(*batches, strict=True)) if batches else (None, None)
                num_before = num_of(manager.gangs.pp)
                found = state.model.run(slots, *parts)
                if found or slots.kept:
                    known |= {(step.index, slot.number): loss for slot, loss in zip(slots.slots, found, strict=False)}
                    found += [known[key] for slot in slots.kept if (key := (step.index, slot.number)) in known]
                num_started = num_of(manager.gangs.pp) - num_before
            else:
                found = []
                for slot, (inputs, targets) in slots:
                    with state.model.accumulate(last=slot.last):
                        loss = loss_sum(state.model(inputs), targets)
                        loss.backward()  # type: ignore[no-untyped-call]
                    found.append(loss.detach())
            if (
                step.index == args.kill
                and manager.gangs.root.rank == manager.gangs.root.size - 1
                and not (killed := Path(f"{args.output}.killed")).exists()
            ):
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            total = torch.stack([torch.zeros((), dtype=torch.float64), *found]).sum()
            max_norm = 0.5 if args.tied else None
            if state.optim.step(weight=slots.num_samples, max_norm=max_norm, sums={"loss": total}):
                losses[step.index] = state.optim.sums["loss"]
    named = state.model.module.named_parameters(remove_duplicate=False)
    whole = [value.detach().flatten().tolist() for _, value in named]
    with args.output.open("a") as file:
        told = {"stage": manager.gangs.pp.rank, "losses": losses, "parameters": whole, "num_started": num_started}
        file.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
