"""Runs a program as some ranks with torchrun's environment, but by forks: they need not import torch.

    python -m tests.integration.forked_ranks [--train] SIZE SCRIPT [ARGUMENTS]
    python -m tests.integration.forked_ranks [--train] SIZE -m MODULE [ARGUMENTS]

`--train`: also import once what the first step of an optimizer imports. Exit code: the first one of a rank that is not
0.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import socket
import sys
import traceback
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import elasticgang.gang  # noqa: F401  # what the ranks would import otherwise
from tests.preloaded import offer_fork_server


def fork_ranks(size: int, function: Callable[[int, int], int]) -> int:
    """Call `function` as each rank, with its number and the port of the store of this process, which torchrun's agent
    has too. Returns the first exit code that is not 0."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    pids = []
    for rank in range(size):  # before the store's thread is there: what it holds would stay held in a fork
        pid = os.fork()
        if pid == 0:
            listener.close()
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0",
            )  # fmt: skip
            offer_fork_server()
            _end(lambda: function(rank, port))  # noqa: B023  # called at once
        pids.append(pid)
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    del store
    return next((code for code in codes if code), 0)


def _end(function: Callable[[], int]) -> None:
    """Of a child: what was inherited from the parent is not ended twice."""
    code = 1
    try:
        code = function()
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(program: Sequence[str]) -> int:
    is_module = program[0] == "-m"
    sys.argv = list(program[is_module:])
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # a Gloo group that outlives the interpreter can end it by SIGABRT
    return 0


def main() -> int:
    size, *program = sys.argv[1:]
    if size == "--train":
        importlib.import_module("torch._dynamo")
        size, *program = program
    return fork_ranks(int(size), lambda rank, port: _run(program))


if __name__ == "__main__":
    _end(main)
