"""A rank whose groups of the backend "elasticgang" are left as soon as they are made: `python -m
tests.integration.lifetime_ranks CASE STORE RANK SIZE`. `STORE` is "host:port"; "" lets rank 0 own the store."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

ROUNDS = 8
GROUPS = 3
LATE_S = 0.3


def main() -> None:
    case, address, rank, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    if case == "exit":  # with the store's server, on rank 0
        dist.init_process_group("elasticgang")
        dist.new_group(list(range(size)))
        os._exit(0)
    host, _, port = address.rpartition(":")
    store = TCPStore(host, int(port), is_master=False)
    if case == "same store":
        initialize_again(PrefixStore("same", store), rank, size)
        return
    for number in range(ROUNDS):
        dist.init_process_group("elasticgang", store=PrefixStore(str(number), store), rank=rank, world_size=size)
        for _ in range(number % 2 * GROUPS):
            dist.new_group(list(range(size)))
        dist.destroy_process_group()


def initialize_again(store: PrefixStore, rank: int, size: int) -> None:
    """torch gives the groups of each round the same names in the store, as it does under torchrun."""
    for number in range(ROUNDS):
        if rank == 0 and number:
            time.sleep(LATE_S)  # the other ranks find what rank 0 wrote in the round before
        dist.init_process_group("elasticgang", store=store, rank=rank, world_size=size)
        total = torch.tensor([rank + number])
        members = range(size) if number % 2 else range(2)  # the name of a small group comes again for a larger one
        group = dist.new_group(list(members))
        if rank in members:
            dist.all_reduce(total, group=group)
            assert total.item() == sum(members) + number * len(members), total
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
