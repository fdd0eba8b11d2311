"""A rank of a job of many ranks, in which two ranks connect when they first exchange something. Run by
`test_many_ranks.py`."""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed import ReduceOp

import elasticgang as eg
from scripts.chaos_runs.soaking.comm_processes import comm_processes
from tests.support import wait_until


def num_connections() -> int:
    return sum(
        found.status == psutil.CONN_ESTABLISHED
        for pid in comm_processes(os.getpid())
        for found in psutil.Process(pid).net_connections("tcp")
    )


def exchanges(pg: Any, rank: int, size: int) -> dict[str, bool]:
    """Whether each kind of exchange gives what it must."""
    found = {}
    ranks = torch.arange(float(size))
    received = torch.zeros(size)
    pg.alltoall_base(received, ranks * size + rank, [], []).wait()
    found["all to all"] = torch.equal(received, rank * size + ranks)
    gathered = [[torch.zeros(1) for _ in range(size)]]
    pg.allgather(gathered, [torch.tensor([float(rank)])]).wait()
    found["all gather"] = torch.equal(torch.cat(gathered[0]), ranks)
    pg.broadcast_one(sent := torch.tensor([float(rank)]), size - 1).wait()
    found["broadcast"] = sent.item() == size - 1
    pg.allreduce([total := torch.full((size,), float(rank))], ReduceOp.MAX).wait()
    found["all reduce"] = bool((total == size - 1).all())
    to, source = (rank + size // 2) % size, (rank - size // 2) % size
    work = pg.send([torch.tensor([float(rank)])], to, 5)
    pg.recv([message := torch.zeros(1)], source, 5).wait()
    work.wait()
    found["message"] = message.item() == source
    if rank == 0:
        sources = []
        for _ in range(size - 1):
            receiving = pg.recv_anysource([torch.zeros(1)], 6)
            receiving.wait()
            sources.append(receiving.source_rank())
        found["any source"] = sorted(sources) == list(range(1, size))
    else:
        pg.send([torch.zeros(1)], 0, 6).wait()
    pg.monitored_barrier(timedelta(seconds=60))
    return found


def main(directory: Path) -> None:
    local_rank, is_first = int(os.environ["LOCAL_RANK"]), not (directory / "killed").exists()
    if local_rank == 1 and not is_first:  # it could otherwise be back before the slowest of the others goes on
        wait_until((directory / "went-on").exists, "a step without this rank")
    manager = eg.join()
    num_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    found: dict[str, Any] = {"sizes": [], "exchanges": {}, "connections": 0}
    for step in manager.steps(6):
        with step:
            root = manager.gangs.root
            total = torch.ones(1000)
            root.all_reduce(total, eg.ReduceOperation.SUM)
            if step.index == 0:
                found["connections"] = num_connections()
            if step.index == 2 and local_rank == 1 and is_first:
                (directory / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if step.index in (1, 5):
                found["exchanges"] |= exchanges(root.as_process_group(), root.rank, root.size)
            if step.index == 4:  # a quick job would otherwise end before the rank is back
                wait_until(
                    lambda: manager.poisoned or manager.join_noticed or manager.num_members == num_ranks, "the rank"
                )
            if manager.commit(1.0, lambda total: None):
                found["sizes"].append(root.size)
                if root.size < num_ranks:
                    (directory / "went-on").touch()
    (directory / f"rank{local_rank}").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
