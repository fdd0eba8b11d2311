"""A rank whose collective over torchft's Gloo, in this process, waits for a peer that is stopped or dead.

`python -m tests.integration.data_ranks STORE RANK SIZE`: it connects, writes "connected", reads a line, starts a
collective, writes "started", reads a line, and ends the configuration. It exits with 0 when the collective has failed
by then.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from datetime import timedelta

import torch
from torchft.process_group import ProcessGroupGloo

from elasticgang.collectives.collective import Collective
from elasticgang.comm.comm_process import GroupSpec
from elasticgang.comm.data_groups import DataGroups
from elasticgang.errors import GangError, OperationalError, PeerLostError

TIMEOUT_S = 60.0


def end_rank(stuck: OperationalError) -> None:
    print(stuck, file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    store, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    groups = DataGroups(
        lambda: ProcessGroupGloo(timedelta(seconds=TIMEOUT_S)), torch.device("cpu"), TIMEOUT_S, end_rank
    )
    present = groups.open()
    present.connect("dp", store, f"rank {rank}", GroupSpec("all", rank, size), 1)
    print("connected", flush=True)
    sys.stdin.readline()
    tensor = torch.ones(1 << 20)
    work = present.start("all", Collective("all_reduce", (tensor,), (tensor,)))
    errors: list[GangError] = []

    def wait() -> None:
        try:
            work.wait()
        except GangError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    print("started", flush=True)
    sys.stdin.readline()
    present.fail(PeerLostError("a test ends the configuration"))
    thread.join()
    groups.close()
    os._exit(0 if errors else 1)


if __name__ == "__main__":
    main()
