"""What an agent is given: the job, where the ranks' output goes, and where events are written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from elasticgang.session.secret import Secret


class Output(Protocol):
    """Where the ranks' output goes."""

    def open(self, local_rank: int) -> tuple[int, int]:
        """Two descriptors for the stdout and stderr of a new process of this rank; the caller closes them."""

    def track_steps(self, local_rank: int, step: Callable[[], int]) -> None:
        """What tells how many steps this rank knows to be committed; from any thread."""

    def write_line(self, line: str) -> None: ...


class Events(Protocol):
    def write(self, event: str, **fields: Any) -> None: ...


@dataclass(frozen=True)
class Job:
    """What to run. `coordinator`: "host:port", or None for one of the job's own. `command`: the child's arguments.
    `num_spares`: processes beside those of `num_ranks`, which wait for one of them to be lost. `max_agents`: 0 for any
    number. `secret`: of the job, from `secret_file`. `env`: of all processes that are started, `rank_env`: of the ranks
    alone. `rank_target`: what a rank process calls first, "module:function"; `preload`: the modules that the fork
    server imports before it forks one."""

    command: dict[str, Any]
    rank_target: str
    preload: tuple[str, ...]
    process_group: str
    num_ranks: int
    job_id: str
    num_spares: int = 0
    coordinator: str | None = None
    connect_timeout: float = 10.0
    max_restarts: int = 3
    grace_period: float = 1.0
    collective_timeout: float = 60.0
    hang_timeout: float | None = None
    coordinator_timeout: float = 300.0
    min_agents: int = 1
    max_agents: int = 0
    secret: Secret | None = None
    secret_file: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    rank_env: dict[str, str] = field(default_factory=dict)

    @property
    def num_processes(self) -> int:
        return self.num_ranks + self.num_spares
