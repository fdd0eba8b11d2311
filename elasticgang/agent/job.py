"""The job that an agent runs, and the interfaces of its output and its event log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from elasticgang.observe.event_names import EventName
from elasticgang.session.credentials import Credentials


class Output(Protocol):
    """Where the ranks' output goes."""

    def open(self, local_rank: int) -> tuple[int, int]:
        """Two descriptors for the stdout and stderr of a new process of this rank; the caller closes them."""

    def track_steps(self, local_rank: int, step: Callable[[], int]) -> None:
        """`step` returns the number of steps that this rank knows to be committed. Any thread may call it."""

    def tail(self, local_rank: int) -> Callable[[], list[str]]:
        """A function that returns the last lines of the process of this rank that was opened last."""

    def when_read(self, local_rank: int, callback: Callable[[], None]) -> None:
        """Call `callback`, on any thread, once what this rank has written until now is read. That takes as long as the
        reader of this command's output stands still."""

    def write_line(self, line: str) -> None: ...


class Events(Protocol):
    def write(self, event: EventName, **fields: Any) -> None: ...

    def write_file(self, name: str, text: str) -> None:
        """Write a file beside the events."""


@dataclass(frozen=True)
class Job:
    """The job to run.

    `coordinator`: "host:port"; None starts an embedded one. `command`: the arguments of `rank_target`.
    `rank_target`: the function that a rank process calls first, "module:function". `preload`: modules that the fork
    server imports before it forks. `process_group`: None for the default of the ranks' device. `compare_state`: the
    steps from one comparison of the ranks' states to the next; 0: none. `num_spares`: processes beyond `num_ranks` that
    wait to replace a lost rank. `max_agents`: 0 for no limit. `devices`: the indices of this host's devices, empty if
    they are unknown, and `max_device_faults`: see `protocol/devices.py`. `env`: environment variables of all started
    processes. Times are in seconds.
    """

    command: dict[str, Any]
    rank_target: str
    preload: tuple[str, ...]
    num_ranks: int
    job_id: str
    process_group: str | None = None
    compare_state: int = 0
    num_spares: int = 0
    coordinator: str | None = None
    connect_timeout: float = 10.0
    max_restarts: int = 3
    devices: tuple[int, ...] = ()
    max_device_faults: int = 2
    grace_period: float | None = None
    collective_timeout: float = 60.0
    hang_timeout: float | None = None
    coordinator_timeout: float = 300.0
    min_agents: int = 1
    max_agents: int = 0
    credentials: Credentials = field(default_factory=Credentials)
    env: dict[str, str] = field(default_factory=dict)

    @property
    def num_processes(self) -> int:
        return self.num_ranks + self.num_spares
