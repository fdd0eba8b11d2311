"""Runs many random schedules in several processes.

BATCH-1  The results depend on the seeds alone, not on the number of processes.
BATCH-2  If the caller stops early, each process exits after its present batch; if the caller dies, at once.
"""

from __future__ import annotations

import concurrent.futures
import gc
import itertools
import multiprocessing
import os
import signal
import threading
import traceback
from collections import Counter, deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field

from elasticgang.protocol.record import LEARNER, SPARE
from elasticgang.simulation.cluster import Cluster
from elasticgang.simulation.schedule import Failure, Schedule

_CHUNK = 50


@dataclass
class Tally:
    """The result of `num_schedules` schedules. `seen`: by the name of an event, in how many schedules it occurred."""

    num_schedules: int = 0
    num_moves: int = 0
    num_records: int = 0
    num_steps: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.num_schedules += other.num_schedules
        self.num_moves += other.num_moves
        self.num_records += other.num_records
        self.num_steps += other.num_steps
        self.seen.update(other.seen)
        self.failures.extend(other.failures)

    def __str__(self) -> str:
        seen = ", ".join(f"{name} in {count}" for name, count in self.seen.most_common())
        return (
            f"{self.num_schedules} schedules, {self.num_moves} moves, {self.num_records} records, "
            f"{self.num_steps} committed steps, {len(self.failures)} failures; {seen}"
        )


def run(seeds: Iterable[int]) -> Tally:
    """Run the schedules of `seeds` in this process. A schedule that raises counts as failed. Garbage is collected
    after each schedule alone: within one, next to everything stays in use."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _run(seeds)
    finally:
        if was_enabled:
            gc.enable()


def _run(seeds: Iterable[int]) -> Tally:
    tally = Tally()
    for seed in seeds:
        schedule = Schedule(seed)
        try:
            failure = schedule.run()
        except Exception:  # in the rules, or in the simulator
            failure = Failure(seed, schedule.setting, tuple(schedule.moves), traceback.format_exc())
        if failure is not None:
            tally.failures.append(failure)
        cluster = schedule.cluster
        tally.num_schedules += 1
        tally.num_moves += len(schedule.moves)
        tally.num_records += len(cluster.chain.records)
        tally.num_steps += max((rank.member_state.committed.step for rank in cluster.ranks.values()), default=0)
        tally.seen.update(_happened(cluster))
        del schedule, cluster, failure
        gc.collect(0)  # the youngest objects: those of the schedule
    return tally


def _happened(cluster: Cluster) -> set[str]:
    records, setting = cluster.chain.records, cluster.setting
    happened = {
        "rolled forward": any(record.rolled_forward for record in records),
        "gone back": any(record.rolled_back for record in records),
        "learner": any(record.members(LEARNER) for record in records[1:]),
        "spare": any(record.members(SPARE) for record in records),
        "spare promoted": any(
            set(before.members(SPARE)) & set(after.plan.ranks) for before, after in itertools.pairwise(records)
        ),
        "asked for spares": setting.num_spares > 0 and any(len(record.agents) > 1 for record in records),
        "only heals": cluster.num_only_healed > 0,
        "given up": bool(cluster.given_up),
        "sharded": cluster.layout.unit > 1,
        "another layout": any(one.layout != other.layout for one, other in itertools.pairwise(records)),
        "state moved": any(record.holders for record in records),
        "agent lost": any(record.dead_agents for record in records),
        "more than three coordinators": len(cluster.coordinators) > 3,
        "state directory": cluster.disk is not None,
        "saved at the end": bool(cluster.saved),
        "forgotten": cluster.chain.num_forgotten > 0,
    }
    return cluster.seen | {name for name, did in happened.items() if did}


def run_over(seeds: range, num_processes: int) -> Generator[Tally, None, None]:
    """Run `seeds` in batches, and yield each batch's tally in the order of the seeds (BATCH-1). Close the generator to
    stop early (BATCH-2)."""
    chunks = (seeds[at : at + _CHUNK] for at in range(0, len(seeds), _CHUNK))
    if num_processes == 1:
        yield from map(run, chunks)
        return
    executor = concurrent.futures.ProcessPoolExecutor(
        num_processes, multiprocessing.get_context("spawn"), initializer=_begin_process
    )
    try:
        under_way: deque[concurrent.futures.Future[Tally]] = deque()
        for chunk in chunks:
            under_way.append(executor.submit(run, chunk))
            if len(under_way) > 2 * num_processes:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        executor.shutdown(cancel_futures=True)


def _begin_process() -> None:
    """BATCH-2: exit with the parent, and ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
