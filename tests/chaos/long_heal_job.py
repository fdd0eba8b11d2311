"""Training in which rank 1 heals for longer than a generation lives: `long_heal_job.py chunks|digests|nothing`.

Its wire lets few chunks through in each generation, or none, or its source takes long to compute digests.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from typing import Any

import torch
import xxhash
from torch import nn

import elasticgang as eg
from elasticgang.protocol import member_lifecycle
from elasticgang.state import digests, snapshot_server, staging
from elasticgang.state.received_chunks import ReceivedChunks
from tests.support import wait_until

NUM_STEPS = 5
NUM_PER_GENERATION = 10
MAX_LOST = 3
SLOW_DIGEST_S = 0.2  # of 49 chunks: the generations of more than MAX_LOST timeouts


def main() -> None:
    staging.CHUNK_BYTES = 4096
    if sys.argv[1] == "nothing":
        member_lifecycle.MAX_STUCK_S, member_lifecycle.LATE_S = 1.5, 0.1
    else:
        member_lifecycle.MAX_LOST_STEPS = MAX_LOST
    if sys.argv[1] == "digests":
        take_long()
    torch.manual_seed(int(os.environ["LOCAL_RANK"]))
    manager = eg.join(layout=eg.ParallelLayout())
    model = eg.DistributedDataParallel(manager, nn.Linear(50_000, 1))  # 49 chunks
    optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.01))
    batches = eg.GlobalBatch(8, size=4, slot=2, seed=0)
    manager.register_state(model=model, optim=optim)
    if sys.argv[1] != "digests" and os.environ["LOCAL_RANK"] == "1":
        narrow(manager, NUM_PER_GENERATION if sys.argv[1] == "chunks" else 0)
    for step in manager.steps(NUM_STEPS):
        with step:
            for slot in batches.slots(step):
                with model.accumulate(last=slot.last):
                    model(torch.ones(len(slot.index), 50_000)).sum().backward()
            optim.step(weight=1.0)
    digest = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
    print(f"finished {digest!r}", flush=True)


def take_long() -> None:
    digests.TELL_S = 0.2
    digests.NUM_DIGESTERS = 1

    def digest(data: memoryview) -> str:
        time.sleep(SLOW_DIGEST_S)
        return xxhash.xxh3_128_hexdigest(data)

    snapshot_server.digest_for = lambda credentials: digest  # type: ignore[attr-defined]


def narrow(manager: eg.QuorumManager, num_per_generation: int) -> None:
    receive, lock, num_through = ReceivedChunks.receive, threading.Lock(), Counter[int]()

    def gated(received: ReceivedChunks, *args: Any) -> None:
        with lock:
            generation = manager.generation
            num_through[generation] += 1
            is_through = num_through[generation] <= num_per_generation
        if not is_through:
            wait_until(lambda: manager.poisoned, "the end of the generation")
            raise OSError("the wire lets no more through")
        receive(received, *args)

    ReceivedChunks.receive = gated  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    main()
