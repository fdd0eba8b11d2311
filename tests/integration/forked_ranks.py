"""Runs a script as some ranks, with the environment that torchrun gives them, but by forks: they need not import torch.

    python -m tests.integration.forked_ranks SIZE SCRIPT

Exit code: the first one of a rank that is not 0.
"""

from __future__ import annotations

import gc
import os
import runpy
import socket
import sys
import traceback

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import elasticgang.gang  # noqa: F401  # what the ranks would import otherwise


def main() -> int:
    size, script = int(sys.argv[1]), sys.argv[2]
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    pids = []
    for rank in range(size):  # before the store's thread is there: what it holds would stay held in a fork
        pid = os.fork()
        if pid == 0:
            listener.close()
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
            )  # fmt: skip
            os._exit(_run(script))  # what was inherited is not ended twice
        pids.append(pid)
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    del store
    return next((code for code in codes if code), 0)


def _run(script: str) -> int:
    try:
        runpy.run_path(script, run_name="__main__")
        dist.destroy_process_group()
        gc.collect()  # a Gloo group that outlives the interpreter can end it by SIGABRT
        return 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
