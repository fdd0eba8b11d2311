"""Runs a job under `elasticgang run`, and reads what it writes while it writes it.

However this process ends, the job ends with it: in order with `stop`, and by the kernel (`parent_death.py`) when it is
killed itself.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from elasticgang.observe.event_file import LineReader
from scripts.demo_job.kills import Killer
from scripts.demo_job.processes import start_command
from scripts.demo_job.run_log import RunLog
from scripts.demo_job.second_host import NUM_RANKS, SecondHost

TRAIN = Path(__file__).with_name("train.py")

_TICK_S = 0.05
_STOP_S = 1.5
_START_LIMIT_S = 180.0
_STALL_LIMIT_S = 60.0

Tick = Callable[[], float | None]


class JobFailedError(Exception):
    """The job did not do its steps. The message says why, in a sentence."""


@dataclass(frozen=True)
class JobSpec:
    """`directory`: where everything of this job goes. `train_args`: for `script`, beside what is named here. `spares`:
    ranks beside `ranks`. `run_args`: for `elasticgang run`. `signal`: what a rank is killed by, in the end.
    `num_parts`: of the model, that ranks hold. `host_every_steps`: a second agent has one more rank, is lost after so
    many steps, and comes back after as many; None for one agent."""

    ranks: int
    steps: int
    seed: int
    directory: Path
    train_args: Sequence[str] = ()
    script: Path = TRAIN
    spares: int = 0
    run_args: Sequence[str] = ()
    signal: signal.Signals = signal.SIGKILL
    num_parts: int = 1
    host_every_steps: int | None = None

    @property
    def all_ranks(self) -> int:
        """With those of the second agent."""
        return self.ranks + (0 if self.host_every_steps is None else NUM_RANKS)

    @property
    def train_argv(self) -> list[str]:
        given = ["--steps", str(self.steps), "--seed", str(self.seed), "--output-dir", str(self.directory)]
        return [*given, *self.train_args]


class Tail:
    """The complete lines of a file that grows, each once."""

    def __init__(self, path: Path) -> None:
        self._lines = LineReader(path)

    def read(self) -> Iterator[Any]:
        yield from map(json.loads, self._lines.read())


class Job:
    """A running job. Used as `with Job(spec) as job:`, which ends it on every way out."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.run_log = RunLog()
        self.log = spec.directory / "job.log"
        self.second_host: SecondHost | None = None
        self._events = Tail(spec.directory / "events.jsonl")
        self._histories: dict[str, Tail] = {}
        self._complete: set[str] = set()

    def __enter__(self) -> Job:
        self.spec.directory.mkdir(parents=True, exist_ok=True)
        script = [*self.spec.run_args, str(self.spec.script), *self.spec.train_argv]
        command = ["run", "--nproc-per-node", str(self.spec.ranks)]
        command += ["--spares", str(self.spec.spares), "--log-dir", str(self.spec.directory)]
        if self.spec.host_every_steps is not None:
            self.second_host = SecondHost(self.spec.directory, script, self.spec.host_every_steps)
            try:
                command += self.second_host.options
                self.second_host.start()
            except BaseException:
                self.second_host.stop()
                raise
        self._agent = start_command([*command, *script], self.log)
        self._agent_fd = os.pidfd_open(self._agent.pid)
        self.killer = Killer(self._agent.pid, self.spec.signal, self.spec.num_parts)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            os.close(self._agent_fd)

    def follow(self, tick: Tick) -> None:
        """Call `tick` after every look at what was written. It returns for how many seconds it need not be called
        again, or None to follow no further; otherwise this returns once the job has done its steps.

        Raises:
            JobFailedError: the job ended in another way, or commits nothing any more. It may still run.
        """
        wait_s: float | None = 0.0
        newest, deadline = self.run_log.newest, time.monotonic() + _START_LIMIT_S
        while wait_s is not None:
            ended = self._wait(min(wait_s, _TICK_S))
            self.read()
            wait_s = tick()
            if ended:
                break
            if self.run_log.newest != newest:
                newest, deadline = self.run_log.newest, time.monotonic() + _STALL_LIMIT_S
            elif time.monotonic() > deadline:
                committed = 0 if newest is None else newest.step + 1
                raise JobFailedError(f"no step was committed for long after {committed} steps; see {self.log}")
        met_the_end = self._agent.returncode == 128 + signal.SIGKILL and self.run_log.finished  # AGENT-10: a kill did
        if self._agent.returncode and not met_the_end:
            raise JobFailedError(f"{self._reason()} (exit code {self._agent.returncode}); see {self.log}")

    def read(self) -> None:
        """Bring the run log up to date."""
        for line in self._events.read():
            self.run_log.add_event(line)
        others = (self.spec.directory / "history").glob("*.jsonl") if self.second_host is not None else ()
        for member in dict.fromkeys([*self.run_log.spawned, *sorted(path.stem for path in others)]):
            if member in self._complete:
                continue
            if member not in self._histories:
                self._histories[member] = Tail(self.spec.directory / "history" / f"{member}.jsonl")
            for line in self._histories[member].read():
                self.run_log.add_history(member, line)
            if member in self.run_log.exited:  # so the event was there before its file was read
                self._complete.add(member)

    def stop(self) -> None:
        """End the job at once, if it still runs. Nothing of it is left then."""
        try:
            if self._agent.poll() is None:
                self._agent.send_signal(signal.SIGTERM)
                self._agent.wait(_STOP_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._agent.kill()  # its fork server ends what it leaves behind
            self._agent.wait()
        finally:
            if self.second_host is not None:
                self.second_host.stop()

    def _wait(self, timeout_s: float) -> bool:
        """Whether the agent has ended; waits for that, at most so long."""
        poll = select.poll()
        poll.register(self._agent_fd, select.POLLIN)
        poll.poll(timeout_s * 1e3)
        return self._agent.poll() is not None

    def _reason(self) -> str:
        if self.run_log.failure is not None:
            return self.run_log.failure
        lines = self.log.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "it said nothing"
