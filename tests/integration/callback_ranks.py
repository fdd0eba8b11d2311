"""Ranks whose callbacks wait for collectives, three deep. In an elastic job (`callback_ranks.py DIRECTORY`), or over
the backend "elasticgang" (`callback_ranks.py DIRECTORY backend`, with torch's variables); the last rank dies in the
innermost callback."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import elasticgang as eg

DEPTH = 3
KILLED_AT = 3
STEPS = 6


def nested(pg: Any, before: Callable[[int], object], level: int = 1) -> torch.Tensor:
    """The sum of the last all-reduce."""
    before(level)
    future = pg.allreduce([torch.full((4,), float(level))]).get_future()
    if level < DEPTH:
        future = future.then(lambda _: [nested(pg, before, level + 1)])
    result: torch.Tensor = future.wait()[0]
    return result


def die_at(level: int) -> None:
    if level == DEPTH:
        os.kill(os.getpid(), signal.SIGKILL)


def elastic(directory: Path, rank: int) -> None:
    died = directory / "died"
    manager = eg.join()
    module = nn.Linear(1, 1, bias=False)  # counts the steps
    weight = nn.init.zeros_(module.weight).data
    manager.register_state(module=module)
    lost = 0
    for step in manager.steps(STEPS):
        with step:
            pg = manager.gangs.root.as_process_group()
            dies = rank == 2 and step.index == KILLED_AT and not died.exists()
            if dies:
                died.touch()
            result = nested(pg, die_at if dies else lambda level: None)
            assert result.isfinite().all()
            if manager.poisoned:
                lost += 1
            elif step.share is not None:
                assert result.tolist() == [float(DEPTH * manager.gangs.root.size)] * 4
            manager.commit(1.0, lambda total: weight.add_(1.0))  # type: ignore[arg-type]
    (directory / f"rank{rank}").write_text(f"{weight.item():g} {lost}\n")


def backend(directory: Path, rank: int) -> None:
    dist.init_process_group("elasticgang")
    pg = dist.group.WORLD
    size = dist.get_world_size()
    assert nested(pg, lambda level: None).tolist() == [float(DEPTH * size)] * 4
    try:
        nested(pg, die_at if rank == size - 1 else lambda level: None)
    except RuntimeError as error:
        (directory / f"rank{rank}").write_text(f"{type(error).__name__}: {error}\n")
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[2:] == ["backend"]:
        backend(Path(sys.argv[1]), int(os.environ["RANK"]))
    else:
        elastic(Path(sys.argv[1]), int(os.environ["LOCAL_RANK"]))
