"""Many random schedules of jobs under coordinators that decide, over processes (see `batch.py`)."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import traceback
from collections import deque
from collections.abc import Generator, Iterable

from elasticgang.protocol.record import LEARNER, SPARE
from elasticgang.simulation.coordinated_schedule import CoordinatedSchedule
from elasticgang.simulation.runner import Tally, _begin_process
from elasticgang.simulation.schedule import Failure

_CHUNK = 50


def run(seeds: Iterable[int]) -> Tally:
    """The schedules of `seeds`, in this process. A schedule that raises has failed too."""
    tally = Tally()
    for seed in seeds:
        schedule = CoordinatedSchedule(seed)
        try:
            failure = schedule.run()
        except Exception:  # in the rules, or in the simulator
            failure = Failure(seed, schedule.setting, tuple(schedule.moves), traceback.format_exc())
        if failure is not None:
            tally.failures.append(failure)
        _count(tally, schedule)
    return tally


def _count(tally: Tally, schedule: CoordinatedSchedule) -> None:
    cluster = schedule.cluster
    tally.num_schedules += 1
    tally.num_moves += len(schedule.moves)
    tally.num_records += len(cluster.chain)
    tally.num_steps += max((rank.member_state.committed.step for rank in cluster.ranks.values()), default=0)
    happened = {
        "rolled forward": any(record.rolled_forward for record in cluster.chain),
        "gone back": any(record.rolled_back for record in cluster.chain),
        "agent lost": any(record.dead_agents for record in cluster.chain),
        "lost but alive": cluster.num_lost_alive > 0,
        "fenced": any(host.num_fences for host in cluster.hosts.values()),
        "evicted": cluster.num_evicted > 0,
        "learner": any(record.members(LEARNER) for record in cluster.chain[1:]),
        "spare": any(record.members(SPARE) for record in cluster.chain),
        "given up": bool(cluster.given_up),
        "several coordinators": len(cluster.coordinators) > 1,
        "more than three coordinators": len(cluster.coordinators) > 3,
        "state directory": cluster.disk is not None,
        "forgotten": cluster.num_forgotten > 0,
        "sharded": cluster.layout.unit > 1,
    }
    tally.seen.update(name for name, did in happened.items() if did)


def run_over(seeds: range, num_processes: int) -> Generator[Tally, None, None]:
    """The schedules of `seeds`, a part at a time, as they are done. To stop early, close it."""
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
