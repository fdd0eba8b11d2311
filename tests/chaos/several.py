"""Jobs of several agents on this machine, with a coordinator of their own, for tests."""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.chaos.test_kills import JOB, check_samples, histories
from tests.support import Command, Job, can_be_forked, is_alive, kill, reserved_port, run_preloaded, wait_until

NUM_STEPS = 30
SLOW_S = 240.0  # processes import torch; a guard, as `support.DEADLINE_S`


class Coordinator(Command):
    """`elasticgang coordinator`."""

    def __init__(
        self,
        directory: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        state: bool = False,
        credentials: Sequence[str] = (),
        program: Sequence[str] = ("-m", "elasticgang"),
        prefix: Sequence[str] = (),
    ) -> None:
        """`program` and `prefix`: see `Job`."""
        options = ["--state-dir", str(directory / "state")] if state else []
        options += credentials
        command = [*prefix, sys.executable, *program, "coordinator", "--host", host, "--port", str(port)]
        super().__init__(directory, [*command, *options], preloaded=can_be_forked(prefix, program))

    @functools.cached_property
    def address(self) -> str:
        """Once it listens."""

        def listening() -> bool:
            assert self.process.poll() is None, self.stderr
            return self.stdout.endswith("\n")

        wait_until(listening, "the coordinator's address")
        return self.stdout.removeprefix("coordinator listening on ").strip()

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


def secret_options(directory: Path) -> list[str]:
    secret = directory / "secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    return ["--secret-file", str(secret)]


class WaitingRanks:
    """Agents of a script whose ranks wait in some steps, and note there what they learn, by files in `notes`."""

    agents: list[Job]
    notes: Path

    def reached(self, step: int, num_ranks: int) -> None:
        """So many processes, those that have died since counted, wait in that step."""
        self._noted("at", step, num_ranks)

    def join_noticed(self, step: int, num_ranks: int) -> None:
        """So many processes that wait in that step know that somebody waits to join. Their agent knows it earlier: from
        then on the job could end before it has told them."""
        self._noted("join", step, num_ranks)

    def leave_requested(self, step: int, num_ranks: int) -> None:
        """So many processes that wait in that step know that they are to leave."""
        self._noted("leave", step, num_ranks)

    def _noted(self, what: str, step: int, num_ranks: int) -> None:
        def found() -> bool:
            for agent in self.agents:
                assert agent.process.poll() in (None, -signal.SIGKILL), agent.stderr
            return len(list(self.notes.glob(f"{what}-{step}-*"))) >= num_ranks

        wait_until(found, f"{num_ranks} ranks in step {step} with {what!r}", SLOW_S)


class Cluster(WaitingRanks):
    """A coordinator and agents, all of one job. As a context manager, ends everything."""

    def __init__(
        self,
        directory: Path,
        *,
        holds: Sequence[int] = (),
        state: bool = False,
        host: str = "127.0.0.1",
        credentials: Sequence[str] = (),
        program: Sequence[str] = ("-m", "elasticgang"),
        prefix: Sequence[str] = (),
    ) -> None:
        """`state`: the coordinator keeps a file. `credentials`: options of all; a secret where it listens beyond
        loopback. `host`, `program` and `prefix`: where the first coordinator listens, and what runs it."""
        self.directory = directory
        self.output = self.notes = directory / "output"
        self.output.mkdir(parents=True)
        self._arguments = ["--output-dir", str(self.output), "--steps", str(NUM_STEPS), "--holds", json.dumps([*holds])]
        self._state = state
        self._credentials = list(credentials)
        if host != "127.0.0.1" and not credentials:
            self._credentials = secret_options(directory)
        self._stack = contextlib.ExitStack()
        self._num_started = 0
        self.agents = []
        port = 0 if prefix else self._stack.enter_context(reserved_port())  # for `restart_coordinator`
        coordinator = Coordinator(
            directory / "coordinator",
            host=host,
            port=port,
            state=state,
            credentials=self._credentials,
            program=program,
            prefix=prefix,
        )
        self.coordinator = self._stack.enter_context(coordinator)

    def start(
        self,
        *,
        ranks: int = 2,
        nnodes: str = "1:9",
        job_id: str = "job",
        options: Sequence[str] = (),
        layout: dict[str, int] | None = None,
        script_options: Sequence[str] = (),
        program: Sequence[str] = ("-m", "elasticgang"),
        prefix: Sequence[str] = (),
    ) -> Job:
        """One more agent. `layout`: that `job.py` declares; `script_options`: further ones of it; `program` and
        `prefix`: see `Job`."""
        self._num_started += 1
        given = ["--coordinator", self.coordinator.address, "--nnodes", nnodes, "--job-id", job_id]
        given += [*self._credentials, *options]
        script = [*self._arguments, "--layout", json.dumps(layout or {}), *script_options]
        directory = self.directory / f"agent-{self._num_started}"
        job = Job(directory, JOB, *script, ranks=ranks, options=given, program=program, prefix=prefix)
        self.agents.append(self._stack.enter_context(job))
        return job

    def restart_coordinator(self) -> None:
        """On the same address; the former one is dead."""
        port = self.coordinator.port
        self.coordinator.process.wait()
        self._num_started += 1
        directory = self.directory / "coordinator"
        if not self._state:
            directory = self.directory / f"coordinator-{self._num_started}"
        self.coordinator = self._stack.enter_context(
            Coordinator(directory, port=port, state=self._state, credentials=self._credentials)
        )

    def release(self, step: int) -> None:
        (self.output / f"go-{step}").touch()

    def check(self, alone: str, agents: Sequence[Job]) -> None:
        """These agents end well, and nothing of what happened shows in the result."""
        for agent in agents:
            assert agent.wait(SLOW_S) == 0, agent.stderr
            agent.assert_nothing_left()
        found = histories(self.output)
        digests = [line["digest"] for history in found for line in history if line["kind"] == "finished"]
        assert digests, "nobody has finished"
        assert set(digests) == {alone}
        check_samples(found)
        self.check_one_chain()

    def check_one_chain(self) -> None:
        """RULE-2: a generation has one digest, whoever tells of it."""
        told = [event for agent in self.agents for event in agent.events() if event["event"] == "generation"]
        chain = {(event["generation"], event["digest"]) for event in told}
        assert len(chain) == len({generation for generation, _ in chain})
        assert {generation for generation, _ in chain} == set(range(1, len(chain) + 1))

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            for agent in self.agents:
                print(f"--- {agent.directory.name}: {agent.process.poll()}\n{agent.stderr[-3000:]}")
                for event in agent.events()[-25:]:
                    print({name: value for name, value in event.items() if name != "wall"})
        self._stack.close()


def run_alone(directory: Path) -> str:
    """The digest of the state that an undisturbed run of one process ends with."""
    command = [sys.executable, str(JOB), "--steps", str(NUM_STEPS), "--output-dir", str(directory)]
    done = run_preloaded(command, ends_at_once=True)
    assert done.returncode == 0, done.stderr
    ((*_, last),) = histories(directory)
    return str(last["digest"])


def generation_of(job: Job, number: int) -> dict[str, Any]:
    return job.expect("generation", generation=number)


def kill_agent(job: Job) -> None:
    """All that it has started is gone when this returns."""
    started = job.processes()
    kill(job.process.pid)
    job.process.wait()
    wait_until(lambda: not any(is_alive(process.pid) for process in started), "the end of the agent's processes")
