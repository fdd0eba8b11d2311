"""Ranks of which one does not come to a monitored barrier: with `--backend`, plain torch under torchrun; else a rank of
an elastic job, which writes what it saw to the directory that is given. Run by `test_any_source.py`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def plain(backend: str) -> None:
    dist.init_process_group(backend)
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    pair = dist.new_group([0, 1])
    if rank == 2:
        store.wait(["found/0", "found/1"])
    else:
        found = ""
        timeout: timedelta | None = timedelta(seconds=4 if rank == 0 else 60)
        if backend == "elasticgang" and rank == 0:  # as the group's own; torch's function ignores Gloo's
            world: Any = dist.group.WORLD
            world.set_timeout(timeout)
            timeout = None
        try:
            dist.monitored_barrier(timeout=timeout, wait_all_ranks=True)
        except RuntimeError as error:
            found = str(error)
        other = ""
        if backend == "elasticgang":  # over Gloo, the other groups go on
            try:
                dist.all_reduce(torch.ones(1), group=pair)
            except RuntimeError as error:
                other = str(error)
        print(json.dumps([rank, [found, other]]), flush=True)
        store.set(f"found/{rank}", "")
    store.set(f"done/{rank}", "")
    if rank == 0:  # the store ends with it
        store.wait([f"done/{other}" for other in range(3)])
    sys.stdout.flush()
    os._exit(0)  # Gloo's destructors wait for those that are gone


def raised_by(pg: Any) -> list[str]:
    """On a poisoned gang."""
    calls: tuple[Callable[[], object], ...] = (
        lambda: pg.recv_anysource([torch.zeros(1)], 0).wait(),
        lambda: pg.monitored_barrier(timedelta(seconds=60)),
        lambda: dist.recv(torch.zeros(1)),
    )
    found = []
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            found.append(type(error).__name__)
    return found


def elastic(directory: Path) -> None:
    import elasticgang as eg

    found: dict[str, Any] = {"lost": "", "after": [], "sources": [], "steps": 0}
    rank = int(os.environ["LOCAL_RANK"])
    manager = eg.join()
    for step in manager.steps(2):
        with step:
            pg: Any = manager.gangs.root.as_process_group()
            eg.set_default_process_group(manager.gangs.root)
            dist.monitored_barrier(timeout=timedelta(seconds=60))
            if rank == 0:
                received = []
                for _ in range(2):
                    source = dist.recv(tensor := torch.empty(1), tag=3)
                    received.append([source, tensor.item()])
                found["sources"] = sorted(received)
            else:
                dist.send(torch.tensor([10.0 * rank]), dst=0, tag=3)
            if step.index == 1 and not found["after"]:
                try:
                    if rank < 2:
                        pg.monitored_barrier(timedelta(seconds=4 if rank == 0 else 60), True)
                    else:
                        pg.barrier().wait()  # until rank 0 has given up
                except eg.StepAborted as error:
                    found["lost"] = str(error)
                found["after"] = raised_by(pg)
            manager.commit(1.0, lambda total: None)
        if step.committed:
            found["steps"] += 1
    (directory / f"rank{rank}").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "--backend":
        plain(sys.argv[2])
    else:
        elastic(Path(sys.argv[1]))
