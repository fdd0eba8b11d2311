"""A job whose steps run compiled collectives, by every way in which code comes to a gang's rank and size; rank 1 kills
itself once. Each committed step checks what came out of them, and writes its size and rank."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import elasticgang as eg
from tests.support import wait_until

STEPS, KILLED_IN = 10, 3
COME_BACK_S = 150.0  # a guard
CALLS = ("group", "name", "default", "mesh", "part", "gang")
WHOLE = 12  # elements: over 3 ranks, and over 2
SIZE = 3


def gathered(part: Tensor, group: Any) -> Tensor:
    everyone = functional.all_gather_tensor(part, 0, group)
    return everyone.sum() + len(everyone)


def of_the_default_group(part: Tensor) -> Tensor:
    everyone = torch.empty(len(part) * dist.get_world_size())
    dist.all_gather_into_tensor(everyone, part)
    return everyone.sum() * 10 + dist.get_rank()


def own_part(mesh: DeviceMesh) -> Tensor:
    """Without any collective: the mesh alone says which part is this rank's."""
    whole = DTensor.from_local(torch.arange(float(WHOLE)), mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(0)]).to_local().sum()


def reduced(values: Tensor, mesh: DeviceMesh) -> Tensor:
    sharded = DTensor.from_local(values, mesh, [Shard(0)], run_check=False)
    doubled = sharded * 2
    assert isinstance(doubled, DTensor)
    whole: Tensor = doubled.full_tensor()
    return whole.sum()


def by_calls_of(gang: eg.Gang, part: Tensor) -> Tensor:
    """Of the gang itself, which are run between the graphs."""
    everyone = part.new_empty(gang.size * len(part))
    gang.all_gather(everyone, part * 2)
    gang.all_reduce(everyone, eg.ReduceOperation.MEAN)
    return everyone.sum() + gang.rank


class Count:
    """What every rank that joins knows of the steps before."""

    def __init__(self) -> None:
        self.num = 0

    def state_dict(self) -> dict[str, int]:
        return {"num": self.num}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num = state["num"]


def wait_for_company(manager: eg.QuorumManager, size: int) -> None:
    deadline = time.monotonic() + COME_BACK_S
    while manager.num_members < size and not (manager.join_noticed or manager.poisoned):
        assert time.monotonic() < deadline, "nobody came back"
        time.sleep(0.002)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=CALLS)
    parser.add_argument("--output-dir", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)

    def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return torch.compile(function, backend=args.backend)

    by_group, by_name = (compiled(lambda part, group: gathered(part, group)) for _ in range(2))
    by_default, by_mesh, part_of_mesh = (compiled(each) for each in (of_the_default_group, reduced, own_part))
    by_gang = compiled(lambda gang, part: by_calls_of(gang, part))
    killed, fewer = args.output_dir / "killed", args.output_dir / "fewer"
    if os.environ["LOCAL_RANK"] == "1" and killed.exists():  # it could otherwise be back before the others go on
        wait_until(fewer.exists, "a step without this rank")
    manager, count = eg.join(), Count()
    manager.register_state(count=count)
    for step in manager.steps(STEPS):
        with step:
            root = manager.gangs.root
            rank, size = root.rank, root.size
            if size < SIZE:
                fewer.touch()
            if killed.exists():
                wait_for_company(manager, SIZE)
            if os.environ["LOCAL_RANK"] == "1" and step.index == KILLED_IN and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            mesh = manager.gangs.device_mesh("root")
            part = torch.full((2,), 10.0**rank)
            total = 2 * sum(10.0**each for each in range(size))
            group = root.as_process_group()
            first = rank * (WHOLE // size)
            calls: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...], float]] = {
                "group": (by_group, (part, group), total + 2 * size),
                "name": (by_name, (part, group.group_name), total + 2 * size),
                "default": (by_default, (part,), total * 10 + rank),
                "mesh": (by_mesh, (part, mesh), 2 * total),
                "gang": (by_gang, (root, part), 2 * total + rank),
                "part": (part_of_mesh, (mesh,), sum(range(first, first + WHOLE // size))),
            }
            found = [calls[name][0](*calls[name][1]) for name in args.calls]
            if manager.commit(1.0, lambda total: None):
                values, wanted = [each.item() for each in found], [calls[name][2] for name in args.calls]
                assert values == wanted, f"step {step.index}, rank {rank} of {size}: {values}, not {wanted}"
                with (args.output_dir / f"rank-{os.environ['LOCAL_RANK']}-{os.getpid()}").open("a") as file:
                    file.write(f"{step.index} {size} {rank}\n")


if __name__ == "__main__":
    main()
