"""Scripts of training jobs, for tests."""

from __future__ import annotations

import textwrap
from pathlib import Path


def script(directory: Path, text: str) -> Path:
    path = directory / "script.py"
    path.write_text(textwrap.dedent(text))
    return path


def training(directory: Path, *, steps: int = 5, setup: str = "", body: str = "", after: str = "") -> Path:
    """A script that trains a tiny model; `body` runs in each step before `optim.step`, `after` after the last one. The
    steps of a job that does not come to its last one leave the cores to others."""
    pause_s = 0.03 if steps >= 100_000 else 0.0
    return script(
        directory,
        f"""\
        import os, pathlib, signal, sys, time
        import torch
        from torch import nn
        import elasticgang as eg

        here, rank = pathlib.Path({str(directory)!r}), int(os.environ["LOCAL_RANK"])
        manager = eg.join()
        model = eg.DistributedDataParallel(manager, nn.Linear(2, 1))
        optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
        batches, data = eg.GlobalBatch(16, size=4, slot=2), torch.ones(16, 2)
        manager.register_state(model=model, optim=optim)
        {setup}
        for step in manager.steps({steps}):
            with step:
                slots = batches.slots(step)
                for slot in slots:
                    with model.accumulate(last=slot.last):
                        model(data[slot.index]).sum().backward()
                {body}
                time.sleep({pause_s})
                optim.step(weight=slots.num_samples)
        {after}
        """,
    )
