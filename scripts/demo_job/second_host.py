"""A job on two agents of this machine, as on two hosts: the second one is lost and comes back again and again.

The second agent has one rank. It is killed with SIGKILL, and its rank with it, only while the ranks of the first agent
hold all parts of the model (KILL-2), and it is started again later. However this process ends, all of it ends too.
"""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.demo_job.kills import Killer
from scripts.demo_job.processes import start_command
from scripts.demo_job.run_log import RunLog, Sizes

_HELD_UP_S = 0.005
_START_LIMIT_S = 60.0
_STOP_S = 1.5
_LISTENING = "coordinator listening on "

NUM_RANKS = 1
"""Of the second agent."""


class SecondHost:
    """The coordinator of both agents, and the second agent. `options`: what the first one's command needs besides."""

    def __init__(self, directory: Path, command: Sequence[str], every_steps: int) -> None:
        """`command`: what each agent runs, from the options of `elasticgang run` that both share on. `every_steps`: for
        which the host is there before it is lost, and is away before it comes back."""
        self.num_lost = 0
        self._directory, self._command, self._every_steps = directory, command, every_steps
        self._coordinator = start_command(["coordinator", "--port", "0"], directory / "coordinator.log")
        self._agent: subprocess.Popen[bytes] | None = None
        self._num_lives = 0
        self._due: int | None = None  # the step after which it is lost, or comes back
        self._first: Sizes | None = None

    @property
    def options(self) -> list[str]:
        return [*self._shared, "--nnodes", "2:9"]  # the job starts with both

    def num_answered(self, run_log: RunLog) -> int:
        """How often the host was lost, without a loss that the job has not answered before its end; at least 1."""
        is_last_open = self._agent is not None and self._agent.poll() is not None and run_log.sizes == self._first
        return max(1, self.num_lost - is_last_open)

    def start(self) -> None:
        """Start the second agent."""
        name = f"second-host-{self._num_lives}"
        self._num_lives += 1
        given = [*self._shared, "--nnodes", "2:9", "--nproc-per-node", str(NUM_RANKS)]
        given += ["--log-dir", str(self._directory / name), *self._command]
        self._agent = start_command(["run", *given], self._directory / f"{name}.log")

    @property
    def _shared(self) -> list[str]:
        return ["--coordinator", self._address(), "--job-id", "demo"]

    def _address(self) -> str:
        """Once the coordinator listens. Raises OSError: it does not."""
        deadline = time.monotonic() + _START_LIMIT_S
        log = self._directory / "coordinator.log"
        while time.monotonic() < deadline and self._coordinator.poll() is None:
            for line in log.read_text().splitlines(keepends=True):
                if line.startswith(_LISTENING) and line.endswith("\n"):
                    return line.removeprefix(_LISTENING).strip()
            time.sleep(_HELD_UP_S)
        raise OSError(f"the coordinator does not listen; see {log}")

    def lose(self, killer: Killer, run_log: RunLog) -> bool:
        """Kill the agent, unless the ranks of the first one may lack a part of the model (KILL-2). Whether it was."""
        if self._agent is None or not killer.all_held(run_log):
            return False
        self._agent.kill()
        self._agent.wait()
        self.num_lost += 1
        return True

    def tick(self, killer: Killer, run_log: RunLog) -> float:
        """Lose the host, or start it again, if it is time. Returns for how many seconds there is nothing to do. It is
        there for `every_steps` from a step in the first layout on, and away for as many from one in a fallback on."""
        if run_log.finished or run_log.newest is None or run_log.sizes is None or self._agent is None:
            return math.inf
        self._first = self._first or run_log.sizes
        is_here = self._agent.poll() is None
        if (run_log.sizes == self._first) != is_here:  # the job has not taken the other layout yet
            self._due = None
            return math.inf
        if self._due is None:
            self._due = run_log.newest.step + self._every_steps
        if run_log.newest.step < self._due:
            return math.inf
        if not is_here:
            self.start()
        elif not self.lose(killer, run_log):
            return _HELD_UP_S
        self._due = None
        return 0.0

    def stop(self) -> None:
        """End what still runs, once the first agent has ended."""
        running = [process for process in (self._agent, self._coordinator) if process and process.poll() is None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + _STOP_S
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()  # an agent's fork server ends what it leaves behind
                process.wait()
