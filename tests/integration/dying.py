"""Processes that hold the mutex of a page and die in some way: targets for a fork server. Imports no torch."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from elasticgang.process import death_watch
from elasticgang.process.status_page import StatusPage

_PAGE_BYTES = 4096


def hold_and(args: dict[str, Any], fds: list[int]) -> int:
    """Hold the mutex of the page `fds[0]`, write a line to `fds[1]`, and do `args["then"]`."""
    page = StatusPage(fds[0])
    memory = touched(args.get("bytes", 0))
    held = threading.Event()

    def watch() -> None:
        death_watch.hold(page.mutex)
        held.set()
        threading.Event().wait()

    threading.Thread(target=watch, daemon=True).start()
    held.wait()
    for _ in range(3):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    then: dict[str, Callable[[], object]] = {
        "sleep": lambda: None,
        "exit": lambda: os._exit(7),
        "crash": lambda: ctypes.string_at(0),
        "raise SIGKILL": lambda: os.kill(os.getpid(), 9),
        "exec": lambda: os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"]),
        "end the main thread": lambda: _end_main_thread(fds[1]),
        "fork and spawn": _fork_and_spawn,
        "overwrite with zeros": lambda: _overwrite(page, 0),
        "overwrite with ones": lambda: _overwrite(page, (1 << 64) - 1),
    }
    then[args["then"]]()
    os.write(fds[1], b"done\n")
    time.sleep(600)
    return len(memory)


def write_on(args: dict[str, Any], fds: list[int]) -> int:
    """Write to the memory `fds[0]` without a pause, by instructions and by system calls; say so on `fds[1]`. `refuse`:
    how the threads refuse SIGVTALRM."""
    refuse: dict[str, Callable[[], object]] = {
        "ignore": lambda: signal.signal(signal.SIGVTALRM, signal.SIG_IGN),
        "handle": lambda: signal.signal(signal.SIGVTALRM, lambda number, frame: None),
        "block": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGVTALRM]),
        "": lambda: None,
    }
    refuse[args.get("refuse", "")]()
    memory = touched(args["bytes"])
    shared = mmap.mmap(fds[0], 0)
    size = len(shared)
    address = ctypes.addressof(ctypes.c_char.from_buffer(shared))
    half = size // 2

    def set_bytes() -> None:
        for value in itertools.cycle(range(256)):
            ctypes.memset(address, value, half)  # without the GIL

    def read_bytes() -> None:
        with open("/dev/urandom", "rb", buffering=0) as source:
            while True:
                source.readinto(memoryview(shared)[half:])

    threads = [threading.Thread(target=target) for target in (set_bytes, set_bytes, read_bytes)]
    for thread in threads:
        thread.start()
    os.write(fds[1], b"done\n")
    for thread in threads:
        thread.join()
    return len(memory)


def touched(num_bytes: int) -> mmap.mmap:
    """Private memory, each of its pages written."""
    memory = mmap.mmap(-1, max(num_bytes, _PAGE_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for offset in range(0, len(memory), _PAGE_BYTES):
        memory[offset] = 1
    return memory


def _end_main_thread(done: int) -> None:
    main = threading.get_native_id()

    def report() -> None:
        while open(f"/proc/self/task/{main}/stat").read().rpartition(")")[2].split()[0] != "Z":  # noqa: SIM115
            time.sleep(0.001)
        os.write(done, b"done\n")

    threading.Thread(target=report).start()
    ctypes.CDLL(None).pthread_exit(None)


def _fork_and_spawn() -> None:
    """Children end, one forked, one executed."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    subprocess.run(["true"], check=True)


def _overwrite(page: StatusPage, value: int) -> None:
    for index in range(death_watch.NUM_WORDS):
        page.mutex[index] = value
