"""Processes with isolated groups of their own, for tests of what they leave behind. Run by `python -m`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from elasticgang.comm.isolated import ProcessGroupIsolatedGloo
from elasticgang.errors import GangError, OperationalError
from elasticgang.process.parent_death import signal_at_parent_death
from scripts.benches.comm import open_store
from tests.integration.rings import Ring
from tests.support import is_alive

WARM_UP = 30
ABORT_EACH = 50  # generations: that one does not end well, and its process is replaced
NUM_LOW = 64
_pids = {os.getpid()}  # of this process and of all that it has started


def reconfigure(generations: str) -> None:
    """Two ranks go through so many configurations with a collective in each. Prints what this process and those below
    it have, before and after."""
    with open_store() as store:
        ring = Ring(lambda: ProcessGroupIsolatedGloo(30.0), 2, store, num_threads=2)
        for number in range(WARM_UP):
            live_through(ring, number)
        before = footprint(ring)
        for number in range(int(generations)):
            live_through(ring, number)
        print(json.dumps({"before": before, "after": footprint(ring)}), flush=True)
        ring.close()


def live_through(ring: Ring, number: int) -> None:
    assert ring.sums(float(number)) == [2.0 * number] * 2
    large = [torch.full((400_000,), float(number)) for _ in range(2)]
    ring.each(lambda rank: ring[rank].allreduce([large[rank]]).wait())
    _pids.update(pg.comm_process.pid for pg in ring.groups)
    if number % ABORT_EACH == ABORT_EACH - 1:
        ring[0].abort()
    ring.configure()


def footprint(ring: Ring) -> dict[str, Any]:
    """Once it has settled: processes that end and groups that are torn down do so beside the path. Those that a
    configuration has replaced are waited for."""
    comms = {comm.pid for pg in ring.groups for comm in (pg.comm_process, pg.wait_standby(30.0))}
    deadline = time.monotonic() + 20
    while not (_comms_with_threads() == comms and _zombies() == []) and time.monotonic() < deadline:
        time.sleep(0.02)
    previous: dict[str, Any] = {}
    for _ in range(100):
        found = _footprint(ring)
        if {**found, "rss_mb": 0, "comm_rss_mb": 0} == {**previous, "rss_mb": 0, "comm_rss_mb": 0}:
            return found
        previous = found
        time.sleep(0.2)
    return previous


def _comms_with_threads() -> set[int]:
    """The comm processes of which a thread still reads."""
    found = (re.fullmatch(r"comm-(\d+)", thread.name) for thread in threading.enumerate())
    return {int(each[1]) for each in found if each}


def _zombies() -> list[int]:
    return [child.pid for child in psutil.Process().children(recursive=True) if not is_alive(child.pid)]


def _shm_files() -> set[str]:
    return set(os.listdir("/dev/shm"))


_shm_before = _shm_files()  # one may have the number of a process that this one starts


def _footprint(ring: Ring) -> dict[str, Any]:
    here = psutil.Process()
    below = here.children(recursive=True)
    _pids.update(child.pid for child in below)
    comms = [psutil.Process(pg.comm_process.pid) for pg in ring.groups if pg.comm_process is not None]
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
    names = _thread_names()
    return {
        "processes": len(below),
        "threads": len(names),
        "descriptors": len(links),
        "memfds": sum("memfd:" in link for link in links),
        "mappings": sum("memfd:" in line for line in open("/proc/self/maps")),
        "shm_files": len([name for name in _shm_files() - _shm_before if _maker(name) in _pids]),
        "rss_mb": round(here.memory_info().rss / 1e6, 1),
        "comm_threads": sum(comm.num_threads() for comm in comms),
        "comm_descriptors": sum(comm.num_fds() for comm in comms),
        "comm_rss_mb": round(sum(comm.memory_info().rss for comm in comms) / 1e6, 1),
        "thread_names": sorted(names),
        "links": sorted(re.sub(r"\d+", "N", link) for link in links),
        "below": sorted(_name(child) for child in below),
    }


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return "one that has just ended"


def _thread_names() -> list[str]:
    """Of all threads of this process: Python's names, and the kernel's for those that Python does not know."""
    known = {thread.native_id: thread.name for thread in threading.enumerate()}
    found = []
    for number in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has just ended
            name = Path(f"/proc/self/task/{number}/comm").read_text().strip()
            found.append(re.sub(r"comm-\d+", "comm-N", known.get(int(number), f"{name} (not Python's)")))
    return found


def _maker(name: str) -> int:
    """The process that made a file of /dev/shm, which torch's names begin with. Others use the folder meanwhile."""
    found = re.match(r"torch_(\d+)_", name)
    return int(found[1]) if found else 0


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def with_few_descriptors() -> None:
    """Two ranks of 256 descriptors reduce many tensors in one call; then none is left for a while."""
    with open_store_beside() as store:
        take_low_descriptors()
        resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_LOW + 256, NUM_LOW + 256))
        ring = Ring(lambda: ProcessGroupIsolatedGloo(30.0), 2, store)
        for size in (3, 20_000):
            many = [[torch.full((size,), float(number)) for number in range(1500)] for _ in range(2)]
            ring.each(lambda rank: ring[rank].allreduce_coalesced(many[rank]).wait())  # noqa: B023
            assert all(tensor[-1].item() == 2 * number for mine in many for number, tensor in enumerate(mine))
        kept = [[torch.ones(300_000) for _ in range(300)] for _ in range(2)]  # each has a mapping of its own
        ring.each(lambda rank: [ring[rank].allreduce([tensor]).wait() for tensor in kept[rank]])
        assert all(tensor[-1].item() == 2.0 for mine in kept for tensor in mine)
        for pg in ring.groups:
            pg.wait_standby(30.0)
        exhaust()
        strided = torch.ones(6_000_000, 2)[:, 0]
        error = failure(lambda: ring[0].allreduce([strided]).wait())
        assert isinstance(error, GangError), repr(error)
        assert "no shared memory" in str(error)
        assert ring[0].errored()
        assert strided.sum().item() == 6_000_000
        ring.configure()  # the standby takes over; another one cannot be started
        assert ring.sums() == [2.0, 2.0]
        ring[0].abort()
        error = failure(lambda: ring[0].configure(ring.next_address(), "replica", 0, 2))
        assert isinstance(error, OperationalError), repr(error)
        resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_LOW + 256, NUM_LOW + 256))
        ring.configure()
        assert ring.sums() == [2.0, 2.0]
        ring.close()


@contextlib.contextmanager
def open_store_beside() -> Iterator[str]:
    """The address of a store in a process of its own, which keeps its descriptors."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            signal_at_parent_death(signal.SIGKILL)
            with open_store() as store:
                os.write(writer, store.encode())
                signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    try:
        yield os.read(reader, 100).decode()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def take_low_descriptors() -> None:
    """The numbers that are left when there is no descriptor: a limit is also one of `poll`, which goes on."""
    while os.open(os.devnull, os.O_RDONLY) < NUM_LOW:
        pass


def exhaust() -> None:
    """From now on this process gets no descriptor, not even one that a thread gives back."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_LOW, NUM_LOW + 256))


def failure(act: Callable[[], object]) -> Exception | None:
    try:
        act()
    except Exception as error:
        return error
    return None


class Slow(Dataset[torch.Tensor]):
    """Its workers are busy: they hold the rank's descriptors, and look at nothing."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        until = time.monotonic() + 600
        while index > 3 and time.monotonic() < until:
            pass
        return torch.ones(1)


def wait_for_ever(address: str) -> None:
    """Rank 0 of two, whose peer never answers, in the middle of a collective, with busy DataLoader workers. Prints the
    pids of the workers, and of what else it has started, by name."""
    pg: Any = ProcessGroupIsolatedGloo(300.0)
    pg.configure(address, "replica", 0, 2)
    pg.wait_standby(30.0)  # it is up, and the workers have its descriptors too
    batches: Any = iter(DataLoader(Slow(), batch_size=1, num_workers=2))
    for _ in range(2):  # one of each worker: both have their names, and are about to be busy
        next(batches)
    work = pg.allreduce([torch.ones(1_000_000)])
    names = [(child.name(), child.pid) for child in psutil.Process().children(recursive=True)]
    started = [(name, pid) for name, pid in names if name.startswith("eg-")]
    workers = [pid for name, pid in names if not name.startswith("eg-")]
    print(json.dumps({"workers": workers, "started": started}), flush=True)
    work.wait()


def shut_down() -> None:
    """End after `shutdown` of the only group."""
    with open_store() as store:
        pg = ProcessGroupIsolatedGloo(30.0)
        pg.configure(f"{store}/shut_down", "replica", 0, 1)
        pg.allreduce([torch.ones(3)]).wait()
        pg.shutdown()


def leave() -> None:
    """End without `shutdown`, one group in the middle of a collective, one that could not be configured. Prints the
    pids of what it leaves."""
    with open_store() as store:
        pg, other = ProcessGroupIsolatedGloo(300.0), ProcessGroupIsolatedGloo(300.0)
        pg.configure(f"{store}/leave", "replica", 0, 1)
        other.set_timeout(timedelta(seconds=0.2))
        with contextlib.suppress(GangError):
            other.configure(f"{store}/alone", "replica", 0, 2)
        work = pg.allreduce([torch.ones(1000)])
        started = [child.pid for child in psutil.Process().children(recursive=True)]
        print(json.dumps(started), flush=True)
        kept.extend([pg, other, work])


kept: list[Any] = []


if __name__ == "__main__":
    arguments: list[Any] = sys.argv[2:]
    globals()[sys.argv[1]](*arguments)
