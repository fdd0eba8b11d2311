"""Runs many random schedules in several processes.

BATCH-1  The results depend on the seeds alone, not on the number of processes.
BATCH-2  If the caller stops early, each process exits after its present batch; if the caller dies, at once.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import multiprocessing
import os
import signal
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from elasticgang.protocol.record import LEARNER, SPARE
from elasticgang.simulation.schedule import Failure, Schedule

_S = TypeVar("_S", bound=Schedule)
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
    """Run the schedules of `seeds` in this process. A schedule that raises counts as failed."""
    return run_schedules(seeds, Schedule, _happened)


def run_schedules(seeds: Iterable[int], make: Callable[[int], _S], happened: Callable[[_S], set[str]]) -> Tally:
    """Like `run`, for the schedules that `make` returns. `happened`: further events of a schedule, for `Tally.seen`."""
    tally = Tally()
    for seed in seeds:
        schedule = make(seed)
        try:
            failure = schedule.run()
        except Exception:  # in the rules, or in the simulator
            failure = Failure(seed, schedule.setting, tuple(schedule.moves), traceback.format_exc())
        if failure is not None:
            tally.failures.append(failure)
        cluster = schedule.cluster
        tally.num_schedules += 1
        tally.num_moves += len(schedule.moves)
        tally.num_records += len(cluster.chain)
        tally.num_steps += max((rank.member_state.committed.step for rank in cluster.ranks.values()), default=0)
        tally.seen.update(
            happened(schedule)
            | names_of(
                {
                    "rolled forward": any(record.rolled_forward for record in cluster.chain),
                    "gone back": any(record.rolled_back for record in cluster.chain),
                    "learner": any(record.members(LEARNER) for record in cluster.chain[1:]),
                    "spare": any(record.members(SPARE) for record in cluster.chain),
                    "given up": bool(cluster.given_up),
                    "sharded": cluster.layout.unit > 1,
                }
            )
        )
    return tally


def names_of(happened: Mapping[str, bool]) -> set[str]:
    return {name for name, did in happened.items() if did}


def _happened(schedule: Schedule) -> set[str]:
    cluster = schedule.cluster
    return cluster.seen | names_of(
        {
            "host lost": any(record.dead_agents for record in cluster.chain),
            "left behind": any(record.absent_agents for record in cluster.chain),
            "spare promoted": any(
                set(before.members(SPARE)) & set(after.plan.ranks)
                for before, after in itertools.pairwise(cluster.chain)
            ),
            "asked for spares": cluster.setting.num_spares > 0
            and any(len(record.agents) > 1 for record in cluster.chain),
            "only heals": cluster.num_only_healed > 0,
            "coordinator restarted": cluster.incarnation > 1,
        }
    )


def run_over(
    seeds: range, num_processes: int, run: Callable[[Iterable[int]], Tally] = run
) -> Generator[Tally, None, None]:
    """Run `seeds` in batches, and yield each batch's tally in the order of the seeds (BATCH-1). Close the generator to
    stop early (BATCH-2). `run`: runs one batch; a module-level function."""
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
