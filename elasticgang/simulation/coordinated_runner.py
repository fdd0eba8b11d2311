"""Many random schedules of jobs under coordinators that decide, over processes (see `runner.py`)."""

from __future__ import annotations

from collections.abc import Generator, Iterable

from elasticgang.simulation import runner
from elasticgang.simulation.coordinated_schedule import CoordinatedSchedule
from elasticgang.simulation.runner import Tally, names_of, run_schedules


def run(seeds: Iterable[int]) -> Tally:
    """See `runner.run`."""
    return run_schedules(seeds, CoordinatedSchedule, _happened)


def _happened(schedule: CoordinatedSchedule) -> set[str]:
    cluster = schedule.cluster
    return cluster.seen | names_of(
        {
            "agent lost": any(record.dead_agents for record in cluster.chain),
            "more than three coordinators": len(cluster.coordinators) > 3,
            "state directory": cluster.disk is not None,
            "forgotten": cluster.num_forgotten > 0,
        }
    )


def run_over(seeds: range, num_processes: int) -> Generator[Tally, None, None]:
    """See `runner.run_over`."""
    return runner.run_over(seeds, num_processes, run)
