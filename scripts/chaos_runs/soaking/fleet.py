"""A job on several agents with a coordinator of their own, all processes of this machine, started again as they end.

However this process ends, its processes end with it: in order with `close`, by the kernel when it is killed itself.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticgang.coordinator.server import ReservedPort
from scripts.chaos_runs.soaking.holders import holders_of, passive_members, seated_members, seats_by_part
from scripts.demo_job.driver import TRAIN, Tail
from scripts.demo_job.processes import start_command
from scripts.demo_job.run_log import RunLog, Spawned, member_name, parts_of

_HERE = "127.0.0.1"
_STOP_S = 3.0


@dataclass(frozen=True)
class FleetSpec:
    """`train_args`: for the script, beside where it writes. `script`: what `elasticgang run` runs, with its options.
    `unit`: the most ranks of a replica group, in any layout of the job."""

    agents: int
    ranks_per_agent: int
    directory: Path
    train_args: Sequence[str]
    script: Sequence[str] = (str(TRAIN),)
    unit: int = 1
    hang_timeout_s: float = 3.0

    @property
    def ranks(self) -> int:
        return self.agents * self.ranks_per_agent

    @property
    def max_drained(self) -> int:
        """How many ranks may have left at once: they come back only with their agent. The others fill two replica
        groups, so that faults can go on."""
        return self.ranks // 2 if self.unit == 1 else min(self.ranks // 2, self.ranks - 2 * self.unit)


@dataclass
class AgentProcess:
    """One life of an agent. `name`: that of the agent in the job, once it has said so."""

    index: int
    process: subprocess.Popen[bytes]
    directory: Path
    events: Tail
    members: dict[str, Spawned] = field(default_factory=dict)
    exited: set[str] = field(default_factory=set)
    name: str | None = None

    def live(self) -> dict[str, Spawned]:
        if self.process.poll() is not None:
            return {}
        return {name: spawned for name, spawned in self.members.items() if name not in self.exited}


class Fleet:
    """Used as `with Fleet(spec) as fleet:`. `fresh` holds the events read last: (agent, line)."""

    def __init__(self, spec: FleetSpec) -> None:
        self.spec = spec
        self.run_log = RunLog()
        self.agents: list[AgentProcess] = []
        self.past: list[AgentProcess] = []
        self.fresh: list[tuple[AgentProcess, dict[str, Any]]] = []
        self.generations: list[tuple[AgentProcess, dict[str, Any]]] = []
        self.changes: list[dict[str, Any]] = []
        self._generation = 0
        self._passive: set[str] = set()
        self._event: dict[str, Any] = {}  # of the newest generation
        self._entered: dict[str, int] = {}  # the newest generation of each member
        self._histories: dict[str, Tail] = {}
        self._complete: set[str] = set()  # of these the whole history is read
        self._port = ReservedPort(_HERE)  # held: between two coordinators another process would get it

    def __enter__(self) -> Fleet:
        self.spec.directory.mkdir(parents=True, exist_ok=True)
        try:
            self.coordinator = self._start_coordinator()
            self.agents = [self._start_agent(index, 0) for index in range(self.spec.agents)]
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def read(self) -> None:
        """Bring the run log up to date."""
        self.fresh = []
        for agent in (*self.agents, *self.past[-4:]):
            for line in agent.events.read():
                self._add_event(agent, line)
        for member in [each for each in self.run_log.spawned if each not in self._complete]:
            if member not in self._histories:
                self._histories[member] = Tail(self.spec.directory / "history" / f"{member}.jsonl")
            for line in self._histories[member].read():
                self.run_log.add_history(member, line)
        for agent in (*self.agents, *self.past):
            self._complete |= agent.exited  # those events were there before the histories were read

    def _add_event(self, agent: AgentProcess, line: dict[str, Any]) -> None:
        self.fresh.append((agent, line))
        match line["event"]:
            case "started":
                agent.name = line["agent"]
            case "spawned":
                name = member_name(line["member"])
                agent.members[name] = Spawned(name, line["t"], line["local_rank"], line["pid"])
                self.run_log.spawned[name] = agent.members[name]
            case "entered":
                self._entered[member_name(line["member"])] = line["generation"]
            case "exited":
                agent.exited.add(member_name(line["member"]))
            case "generation":
                self.generations.append((agent, line))
                self._seated(line)
            case "generation_change":
                self.changes.append(line)

    def _seated(self, line: dict[str, Any]) -> None:
        """A generation has begun."""
        if line["generation"] < self._generation:
            return
        self._generation = line["generation"]
        live = {name: (agent.name, spawned.local_rank) for name, (agent, spawned) in self.live().items()}
        self._passive = passive_members(line, live, self._passive)
        self._event = line

    def holders(self) -> list[list[str]]:
        """Groups of live members: the newest committed state is whole while one of each is left. [] if that is not
        known. In a layout that has committed nothing yet, the former holders keep all parts until the vote of a step
        that commits nothing, which no history tells, and the new ones hold them from that on."""
        newest, sizes = self.run_log.newest, self.run_log.sizes
        if newest is None:
            return []
        live = self.live()
        is_newer = newest.generation < self._generation
        former = list(holders_of(self.run_log, live.keys() - (self._passive if is_newer else set())).values())
        if not is_newer or sizes is None:
            return former
        where = {name: (agent.name, member.local_rank) for name, (agent, member) in live.items()}
        by_seat = seated_members(self._event, where, self._entered)
        seated = seats_by_part(self._event)
        if seated.keys() == set(parts_of(sizes)):
            return former
        new = [[by_seat[seat] for seat in seats if seat in by_seat] for seats in seated.values()]
        return new if self._event["active"] else former + new

    def revive(self) -> list[str]:
        """Start what has ended, but for agents that have done their part. Returns what was started."""
        started = []
        if self.coordinator.poll() is not None:
            self.coordinator = self._start_coordinator()
            started.append("coordinator")
        for place, agent in enumerate(self.agents):
            if agent.process.poll() is not None and not self.run_log.finished:
                self.past.append(agent)
                lives = sum(past.index == agent.index for past in self.past)
                self.agents[place] = self._start_agent(agent.index, lives)
                started.append(f"agent {agent.index}")
        return started

    @property
    def address(self) -> str:
        """Of the coordinators, one after another. No other process gets the port until `close`."""
        return f"{_HERE}:{self._port.port}"

    @property
    def is_over(self) -> bool:
        """All agents have ended, after a rank of theirs had done all steps."""
        return bool(self.run_log.finished) and all(agent.process.poll() is not None for agent in self.agents)

    def live(self) -> dict[str, tuple[AgentProcess, Spawned]]:
        return {name: (agent, spawned) for agent in self.agents for name, spawned in agent.live().items()}

    def close(self) -> None:
        """End all that still runs. Nothing of it is left then."""
        processes = [agent.process for agent in (*self.agents, *self.past)]
        if hasattr(self, "coordinator"):
            processes.append(self.coordinator)
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        for process in processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()  # an agent's fork server ends what it leaves behind
                process.wait()
        self._port.close()

    def _start_coordinator(self) -> subprocess.Popen[bytes]:
        state = self.spec.directory / "coordinator"
        command = ["coordinator", "--host", _HERE, "--port", str(self._port.port), "--state-dir", str(state)]
        return start_command(command, self.spec.directory / "coordinator.log")

    def _start_agent(self, index: int, life: int) -> AgentProcess:
        directory = self.spec.directory / f"agent-{index}.{life}"
        directory.mkdir()
        command = ["run", "--coordinator", self.address, "--job-id", "soak"]
        command += ["--nnodes", f"1:{self.spec.agents}", "--nproc-per-node", str(self.spec.ranks_per_agent)]
        command += ["--log-dir", str(directory), "--hang-timeout", f"{self.spec.hang_timeout_s:g}"]
        command += [*self.spec.script, *self.spec.train_args, "--output-dir", str(self.spec.directory)]
        process = start_command(command, directory / "agent.log")
        return AgentProcess(index, process, directory, Tail(directory / "events.jsonl"))

    def failures(self) -> list[str]:
        """Why agents that were left alone ended badly."""
        return [
            f"agent {agent.index} failed: {line['reason']}"
            for agent in (*self.agents, *self.past)
            for line in Tail(agent.directory / "events.jsonl").read()
            if line["event"] == "failed"
        ]
