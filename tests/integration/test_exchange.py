"""The sum of a few numbers by an exchange, over real Gloo groups and in a job of more ranks than send to all others."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from elasticgang.collectives.collective import Collective
from elasticgang.collectives.table import TABLE
from elasticgang.torch_private import gloo_device, new_gloo
from tests.support import DEADLINE_S


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


@pytest.mark.parametrize("size", [2, 3, 8, 13])
def test_all_ranks_get_the_same_sum_bit_by_bit(size: int, threads: ThreadPoolExecutor) -> None:
    """EXCHANGE-1, twice in a row on one group."""
    store = HashStore()
    numbers = [[random.Random(rank).uniform(-1e6, 1e6) for _ in range(5)] for rank in range(size)]

    def exchange(rank: int) -> list[list[float]]:
        group = new_gloo(store, rank, size, timedelta(seconds=DEADLINE_S), gloo_device("127.0.0.1"))
        sums = []
        for _ in range(2):
            mine = torch.tensor(numbers[rank], dtype=torch.float64)
            total = torch.empty_like(mine)
            work, last = TABLE["exchange_sum"].issue(group, Collective("exchange_sum", (total,), (mine,)))
            work.wait()
            assert last is None
            assert mine.tolist() == numbers[rank]
            sums.append(total.tolist())
        group.barrier().wait()  # nobody leaves while another still receives
        return sums

    first, *others = threads.map(exchange, range(size))
    assert first[0] == first[1] == pytest.approx([math.fsum(column) for column in zip(*numbers, strict=True)])
    assert all(other == first for other in others)
