"""A rank of `elasticgang run` whose generation changes twice: one of four ranks is killed, and comes back.

step 0      four ranks: they make groups, and use them
step 1      one rank is killed. The others try the step again, as three: they find that the groups of before raise,
            and run the programs
later       once the rank is back they run the programs again, as four
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import elasticgang as eg
from tests.integration.programs.catalog import programs
from tests.integration.programs.runner import perform
from tests.support import wait_until

VICTIM = 3
MANY_STEPS = 100_000
THREE, FOUR = "three", "four"


class Kept:
    """What a program made in the first generation, and kept."""

    def __init__(self) -> None:
        self.group = dist.new_group([0, 1, 2])
        self.everyone = dist.new_group(list(range(dist.get_world_size())))
        self.grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.line: DeviceMesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.table = distribute_tensor(torch.arange(16.0).view(8, 2), self.grid, [Shard(0), Replicate()])
        self.lined = distribute_tensor(torch.arange(16.0).view(8, 2), self.line, [Shard(0)])
        self.ddp = DistributedDataParallel(nn.Linear(2, 2), process_group=self.everyone)

    def use(self) -> None:
        for name, call in self.calls().items():
            if not (name.startswith("group") and dist.get_rank() == VICTIM):
                call()

    def calls(self) -> dict[str, Callable[[], object]]:
        group: Any = self.group
        tp = self.grid["tp"]
        return {
            "group.all_reduce": lambda: dist.all_reduce(torch.ones(2), group=group),
            "group.async": lambda: dist.all_reduce(torch.ones(2), group=group, async_op=True).wait(),
            "group.objects": lambda: dist.all_gather_object([None] * 3, "mine", group=group),
            "group.broadcast objects": lambda: dist.broadcast_object_list([dist.get_rank()], src=0, group=group),
            "group.barrier": lambda: dist.barrier(group=group),
            "group.functional": lambda: functional.wait_tensor(functional.all_reduce(torch.ones(2), "sum", group)),
            "group.checkpoint": lambda: dcp.save({"a": torch.ones(2)}, checkpoint_id=_scratch(), process_group=group),
            "group.ddp": lambda: DistributedDataParallel(nn.Linear(2, 2), process_group=group),
            "everyone.all_reduce": lambda: dist.all_reduce(torch.ones(2), group=self.everyone),
            "everyone.ddp": lambda: self.ddp(torch.ones(2, 2)).sum().backward(),
            "grid.group": lambda: dist.all_reduce(torch.ones(2), group=self.grid.get_group("dp")),
            "grid.functional": lambda: functional.wait_tensor(functional.all_reduce(torch.ones(2), "sum", tp)),
            "grid.tensor": lambda: self.table.full_tensor(),
            "line.tensor": lambda: self.lined.full_tensor(),
        }  # fmt: skip

    def what_raises(self) -> dict[str, str]:
        """By call, what it raised; "" for nothing."""
        found = {}
        for name, call in self.calls().items():
            try:
                call()
                found[name] = ""
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        return found


def _scratch() -> Path:
    path = Path("scratch")
    path.mkdir(exist_ok=True)
    return path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    output: Path = parser.parse_args().output
    torch.set_num_threads(1)
    selected = [program for program in programs().values() if program.any_size]
    killed, done_as_three = output / "killed", output / "done-as-three"
    if killed.exists():  # this is the one that comes back
        wait_until(done_as_three.exists, "the others have run the programs as three")

    manager = eg.join()
    manager.register_state(model=nn.Linear(1, 1))
    kept: Kept | None = None
    has_run: set[str] = set()
    for step in manager.steps(MANY_STEPS):
        with step:
            rank, size = dist.get_rank(), dist.get_world_size()
            if step.index == 0:
                kept = Kept()
                kept.use()
            elif step.index == 1 and size == 4:
                if rank == VICTIM:
                    killed.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                dist.barrier()
            elif size == 3 and THREE not in has_run:
                assert kept is not None
                (output / f"stale-{rank}.json").write_text(json.dumps(kept.what_raises()))
                for program in selected:
                    perform(program, output / THREE, rank)
                has_run.add(THREE)
                dist.barrier()
                done_as_three.touch()
            elif size == 4 and FOUR not in has_run:
                for program in selected:
                    perform(program, output / FOUR, rank)
                has_run.add(FOUR)
                manager.leave()
            manager.commit(1.0, lambda total: None)


if __name__ == "__main__":
    main()
