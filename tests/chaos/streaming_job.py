"""Trains on a `StreamingDataset` of MosaicML Streaming by index, made by the block of docs/data.md that is in `BLOCK`.
Run by `test_streaming.py`."""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import torch
from streaming import StreamingDataset
from torch.nn import functional

import elasticgang as eg


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    torch.manual_seed(0)
    manager = eg.join()
    model = eg.DistributedDataParallel(manager, torch.nn.Linear(1, 4), reduction="reproducible")
    optim = eg.Optimizer(manager, torch.optim.AdamW(model.parameters()))
    names: dict[str, Any] = {"os": os, "tempfile": tempfile, "StreamingDataset": StreamingDataset}
    exec(os.environ["BLOCK"], names)
    dataset = names["dataset"]
    batches = eg.GlobalBatch(len(dataset), size=32, slot=4)
    loader = eg.DataLoader(dataset, batches, num_workers=2)
    manager.register_state(model=model, optim=optim)
    for step in manager.steps(args.steps):
        with step:
            slots = loader.slots(step)
            for slot, batch in slots:
                assert batch["number"].tolist() == slot.index.tolist(), "other samples than the slot's"
                inputs = batch["number"][:, None] / len(dataset)
                with model.accumulate(last=slot.last):
                    loss = functional.cross_entropy(model(inputs), batch["number"] % 4, reduction="sum")
                    loss.backward()  # type: ignore[no-untyped-call]
            optim.step(weight=slots.num_samples)
    loader.close()


if __name__ == "__main__":
    main()
