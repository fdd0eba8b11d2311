"""Jobs that take another layout, for tests: a coordinator, agents that come and go, and ranks that wait in a step."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TypeVar

from tests.chaos.several import Coordinator, WaitingRanks, kill_agent
from tests.chaos.test_checkpoints import newest
from tests.support import Job, wait_until

_T = TypeVar("_T", bound="HeldJob")


class HeldJob(WaitingRanks):
    """A coordinator and agents of a script that waits in the step that stands in the file `hold`. As a context manager,
    ends everything."""

    def __init__(self, directory: Path, script: Path, layouts: str, steps: int, every: int = 0) -> None:
        """`layouts`, `steps`, `every`: the script's arguments behind the directory; `every` of checkpoints, 0 for
        none."""
        self.directory, self._script, self._every = directory, script, every
        self._arguments = (directory, layouts, steps, every)
        self._stack = contextlib.ExitStack()
        self.agents, self.notes = [], directory
        self.coordinator = self._stack.enter_context(Coordinator(directory / "coordinator"))

    def start(self, ranks: int, env: dict[str, str] | None = None, *, at_least: int = 1) -> Job:
        options = ["--coordinator", self.coordinator.address, "--nnodes", f"{at_least}:9", "--job-id", "job"]
        if self._every:
            options += ["--checkpoint-dir", str(self.directory / "checkpoints")]
        directory = self.directory / f"agent-{len(self.agents)}"
        job = Job(directory, self._script, *map(str, self._arguments), ranks=ranks, options=options, env=env)
        self.agents.append(self._stack.enter_context(job))
        return job

    def hold(self, step: int) -> None:
        """The ranks wait in `step`."""
        (self.directory / "hold.new").write_text(str(step))
        (self.directory / "hold.new").rename(self.directory / "hold")

    def release(self) -> None:
        (self.directory / "hold").unlink()

    def lose_the_second_host(self, ranks: int, env: dict[str, str] | None = None, *, step: int) -> Job:
        """Start hosts of `ranks` ranks and of one. In `step`, in which all wait, and with a checkpoint if there are
        any, kill the second host. Returns the first, once it knows."""
        self.hold(step)
        first, second = self.start(ranks, env, at_least=2), self.start(1, env, at_least=2)
        self.reached(step, ranks + 1)
        if self._every:
            wait_until(lambda: newest(self.directory) == self._every, "a checkpoint")
        kill_agent(second)
        first.expect("host lost")
        return first

    def __enter__(self: _T) -> _T:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for agent in self.agents if kind is not None else ():
            print(f"--- {agent.directory.name}: {agent.process.poll()}\n{agent.stderr[-3000:]}")
        self._stack.close()


def loads(agents: list[Job]) -> list[str]:
    """The agents of which a rank has loaded a checkpoint."""
    return [agent.directory.name for agent in agents if "loaded the checkpoint" in agent.stderr]
