"""Messages between two ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.integration.programs.catalog import Values, program


def _neighbours() -> tuple[int, int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return (rank + 1) % size, (rank - 1) % size


@program()
def send_and_receive(group: dist.ProcessGroup | None = None) -> Values:
    rank = dist.get_rank()
    tensor = torch.full((3, 2), float(rank))
    source = None
    if rank % 2 == 0:
        dist.send(tensor, rank + 1, group=group)
    else:
        source = dist.recv(tensor, rank - 1, group=group)
    return {"tensor": tensor, "source": source}


@program()
def ring_of_messages() -> Values:
    after, before = _neighbours()
    received = torch.empty(4, dtype=torch.int64)
    works = [dist.isend(torch.full((4,), dist.get_rank()), after), dist.irecv(received, before)]
    for work in works:
        assert work is not None
        work.wait()
    return {"received": received}


@program()
def tags_tell_messages_apart() -> Values:
    rank = dist.get_rank()
    first, second = torch.zeros(2), torch.zeros(2)
    if rank == 0:
        works: list[Any] = [dist.isend(torch.full((2,), float(tag)), 1, tag=tag) for tag in (1, 2)]
    elif rank == 1:
        works = [dist.irecv(second, 0, tag=2), dist.irecv(first, 0, tag=1)]
    else:
        works = []
    for work in works:
        work.wait()
    return {"first": first, "second": second}


@program()
def batch_of_messages() -> Values:
    after, before = _neighbours()
    forward, backward = torch.empty(3), torch.empty(2)
    mine = torch.full((3,), float(dist.get_rank()))
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, mine, after),
            dist.P2POp(dist.irecv, forward, before),
            dist.P2POp(dist.isend, mine[:2] * 10, before),
            dist.P2POp(dist.irecv, backward, after),
        ]
    )
    for work in works:
        work.wait()
    return {"forward": forward, "backward": backward}


@program()
def messages_from_any_source(group: dist.ProcessGroup | None = None) -> Values:
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(torch.full((2,), float(rank)), 0, group=group)
        return {}
    found: dict[int, Tensor] = {}
    for _ in range(size - 1):
        source = dist.recv(tensor := torch.empty(2), group=group)
        found[source] = tensor
    return {"by source": dict(sorted(found.items()))}


@program()
def messages_in_a_sub_group() -> Values:
    rank = dist.get_rank()
    group = dist.new_group([1, 3])
    tensor = torch.full((2,), float(rank))
    if rank == 1:
        dist.send(tensor, 3, group=group)
    elif rank == 3:
        dist.recv(tensor, group=group, group_src=0)
    return {"tensor": tensor}


@program()
def messages_of_objects() -> Values:
    rank = dist.get_rank()
    objects: list[Any] = [None, None]
    if rank == 2:
        dist.send_object_list([{"loss": 0.5}, "done"], dst=0)
    elif rank == 0:
        dist.recv_object_list(objects, src=2)
    return {"objects": objects}


@program()
def messages_across_collectives() -> Values:
    """A message that is received only after a collective that both take part in."""
    rank = dist.get_rank()
    tensor = torch.full((2,), float(rank))
    work = dist.isend(tensor, 2) if rank == 0 else None
    dist.all_reduce(total := torch.ones(1))
    received = torch.zeros(2)
    if rank == 2:
        dist.recv(received, 0)
    if work is not None:
        work.wait()
    return {"received": received, "total": total}
