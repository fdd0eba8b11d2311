"""How long a deciding coordinator takes for one change, what it sends, and what heartbeats cost it.

The coordinator is a process of its own with a state directory and a secret. The agents' sessions are real, over
loopback, from several processes; the ranks are simulated: they abort, and are ready, at once. A rank of a random agent
is lost, and joins again, again and again. Prints one JSON line per figure:

  change_ms           from the loss to the last agent that has the next record: p50, max
  join_ms             from the newcomer's report to the last agent that has the next record: p50, max
  change_cpu_ms       of the coordinator for one lost rank: p50, max (in steps of 10 ms)
  sent_bytes          by the coordinator to each agent for one lost rank: mean
  first_sent_bytes    for the first one, after which all learners are active
  facts_ms            all agents tell at once that their ranks wait, as when one hangs: until the last knows of others
  facts_cpu_ms        of the coordinator for that
  heartbeat_cpu       of the coordinator while nothing happens, in percent of a core

With `--tls` there is a second coordinator with agents of its own, which speak TLS. The changes take turns, each figure
names its coordinator, and two more compare them:

  tls_ratio           of the p50 of change_ms and of join_ms, with TLS to without
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from elasticgang.coordinator.decision_server import CoordinatorServer, ServerOptions
from elasticgang.coordinator.server import collect_rarely
from elasticgang.coordinator.state_directory import StateDirectory
from elasticgang.layout import ParallelLayout
from elasticgang.protocol import agent_events
from elasticgang.protocol.agent_session import AgentSession
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.coordinator_messages import (
    EMBEDDED_TIMEOUTS,
    EndGeneration,
    JoinRequest,
    Notify,
    Welcome,
)
from elasticgang.protocol.end_cause import EndCause
from elasticgang.protocol.job_facts import AgentFacts, JobFacts, Wait
from elasticgang.protocol.record import NO_RECORD, MemberReport, Record, Report, Seat
from elasticgang.protocol.rendezvous_keys import RendezvousKeys
from elasticgang.session.agent_client import AgentClient
from elasticgang.session.credentials import Credentials, credentials_from_json
from elasticgang.session.secret import Secret
from elasticgang.session.tls import Tls, TlsContents, TlsFiles
from scripts.figures import print_figures

_JOB = "bench"
_LIMIT_S = 120.0
_PAUSE_S = 0.3
_LAYOUT = ParallelLayout()
_ADDRESS = "127.0.0.1:1"
# An agent shares its process with hundreds of others, and may be slow beside them on a machine that is busy: no lease
# ends here, and no session is given up.
_TIMEOUTS = replace(EMBEDDED_TIMEOUTS, answer_s=_LIMIT_S)


def received(pipe: Connection) -> Any:
    """The next message; None, as at the end of the bench, if the bench was killed."""
    try:
        return pipe.recv()
    except EOFError:
        return None


def coordinator_process(directory: str, fields: dict[str, Any], pipe: Connection) -> None:
    collect_rarely()  # as `coordinator.server.prepare_process` does

    async def run() -> None:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        state = StateDirectory(Path(directory))
        options = ServerOptions(credentials_from_json(fields), state, timeouts=_TIMEOUTS)
        server = CoordinatorServer(options, lambda line: print(line, file=sys.stderr), ended.set_exception)
        pipe.send(await server.start("127.0.0.1", 0))

        def on_request() -> None:
            if received(pipe) == "usage":
                used = os.times()
                pipe.send((used.user + used.system, server.num_bytes_sent))
            else:
                loop.remove_reader(pipe.fileno())
                ended.set_result(None)

        loop.add_reader(pipe.fileno(), on_request)
        await ended

    asyncio.run(run())


def report_of(
    agent: str,
    members: dict[int, str],
    fresh: set[str],
    record: Record | None,
    own: Iterable[Seat],
    num_ranks: int,
    num_agents: int,
) -> Report:
    """Of ranks that are nothing but names. `members`: by local rank. `fresh`: of these, those that `record` lacks.
    `own`: the agent's seats in it."""
    reports = []
    for rank, member in members.items():
        if record is None or member in fresh:
            reports.append(MemberReport(member, rank, _ADDRESS))
        else:
            healed = record.committed, None, (0, 0, 0), record.generation, True
            reports.append(MemberReport(member, rank, _ADDRESS, *healed))
    return Report(
        agent=agent,
        host=agent,
        job=_JOB,
        layout=_LAYOUT,
        newest_record=NO_RECORD if record is None else record.ref,
        members=tuple(reports),
        newest_commit=None if record is None or record.committed == Attempt(0, 1) else record.committed,
        exited=tuple(seat.member for seat in own if seat.member not in members.values()),
        num_ranks=num_ranks,
        address=_ADDRESS,
        min_agents=num_agents,
    )


class SimulatedAgent:
    """Ranks that are nothing but names."""

    def __init__(self, number: int, port: int, credentials: Credentials, args: argparse.Namespace, tell: Any) -> None:
        self.number, self._args, self._tell = number, args, tell
        self._name = f"agent-{number:05}"
        self._record: Record | None = None
        self._members = {rank: f"{self._name}/{rank}/1" for rank in range(args.ranks)}
        self._num_started = 1
        self._fresh: set[str] = set(self._members.values())
        self._is_ready = True
        self._has_heard = False
        session = AgentSession(self._name, incarnation=f"{number}", timeouts=_TIMEOUTS)
        self.client = AgentClient(session, self, ("127.0.0.1", port), _JOB, credentials)

    def start(self) -> None:
        self.client.start()
        self.client.request_report()

    def lose_rank(self) -> None:
        assert self._record is not None
        self._tell("lost", self._record.generation)
        self._members.pop(self._args.ranks - 1)
        self._is_ready = True
        self.client.notify(Notify(EndGeneration(self._record.generation, EndCause("a rank is lost"))))
        self.client.request_report()

    def start_rank(self) -> None:
        assert self._record is not None
        self._tell("joins", self._record.generation)
        self._num_started += 1
        member = f"{self._name}/{self._args.ranks - 1}/{self._num_started}"
        self._members[self._args.ranks - 1] = member
        self._fresh.add(member)
        self.client.notify(Notify(JoinRequest(self._record.generation)))

    def tell_others(self) -> None:
        self._tell("tells")
        self.client.notify(Notify(AgentFacts(waits=(Wait(2, 1234567890, 100),))))

    # -- what its session asks for

    def set_lease(self, until_s: float) -> None: ...

    def collect_report(self) -> Report | None:
        return self._report() if self._is_ready else None

    def _report(self) -> Report:
        record, args = self._record, self._args
        own = () if record is None else record.seats_of(self._name)
        return report_of(self._name, self._members, self._fresh, record, own, args.ranks, args.agents)

    def inform(self, event: Any) -> None:
        if isinstance(event, agent_events.PeerNotice):
            if self._record is not None and event.generation == self._record.generation and not self._is_ready:
                self._is_ready = True
                self.client.request_report()
        elif isinstance(event, JobFacts):
            if not self._has_heard and any(wait.agent == "" for wait in event.waits):
                self._has_heard = True
                self._tell("heard")
        elif isinstance(event, agent_events.RecordAnswered):
            if not isinstance(event.answer, Record):
                self._tell("said", repr(event.answer))
                return
            self._record, self._is_ready = event.answer, False
            self._fresh.clear()
            self._tell("record", event.answer.generation, len(event.answer.seats_of(self._name)))

    def kill_ranks(self, reason: str) -> None:
        self._tell("said", reason)

    def welcomed(self, welcome: Welcome, host: str) -> None: ...

    def receive_keys(self, message: RendezvousKeys) -> None:
        raise AssertionError(message)

    def disconnected(self, reason: str) -> None:
        self._tell("said", reason)


def agents_process(
    numbers: range, port: int, fields: dict[str, Any], args: argparse.Namespace, pipe: Connection
) -> None:
    """Sends what happens in batches: one write for many agents."""
    collect_rarely()  # an agent alone has a small part of these objects
    batch: list[tuple[float, int, tuple[Any, ...]]] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def flush() -> None:
            pipe.send(batch)
            batch.clear()

        def teller(number: int) -> Any:
            def tell(*what: Any) -> None:
                if not batch:
                    loop.call_soon(flush)
                batch.append((time.monotonic(), number, what))

            return tell

        agents = {n: SimulatedAgent(n, port, credentials_from_json(fields), args, teller(n)) for n in numbers}

        def on_order() -> None:
            order = received(pipe)
            if order is None:
                loop.remove_reader(pipe.fileno())
                ended.set_result(None)
            else:
                number, verb = order
                getattr(agents[number], verb)()

        loop.add_reader(pipe.fileno(), on_order)
        for agent in agents.values():
            agent.start()
        await ended
        await asyncio.gather(*(agent.client.stop() for agent in agents.values()))

    asyncio.run(run())


class Fleet:
    def __init__(self, port: int, fields: dict[str, Any], args: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self._args = args
        self._pipes: list[Connection] = []
        self._pipe_of: dict[int, Connection] = {}
        self._processes = []
        share = -(-args.agents // args.processes)
        for first in range(0, args.agents, share):
            numbers = range(first, min(first + share, args.agents))
            here, there = context.Pipe()
            process = context.Process(target=agents_process, args=(numbers, port, fields, args, there), daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(here)
            self._pipe_of.update(dict.fromkeys(numbers, here))

    def order(self, agent: int, verb: str) -> None:
        self._pipe_of[agent].send((agent, verb))

    def all_have(self, num_members: int) -> float:
        """Wait until every agent has a record of so many members. Returns the seconds since the first thing told."""
        first_s: float | None = None
        having: dict[int, dict[int, int]] = {}
        end_s = time.monotonic() + _LIMIT_S
        last_s = 0.0
        while time.monotonic() < end_s:
            ready = set(multiprocessing.connection.wait(self._pipes, 1.0))
            for pipe in [pipe for pipe in self._pipes if pipe in ready]:
                for at_s, number, what in pipe.recv():
                    if what[0] in ("lost", "joins"):
                        first_s = at_s
                    elif what[0] == "said":
                        print(f"agent {number}: {what[1]}", file=sys.stderr)
                    else:
                        own = having.setdefault(what[1], {})
                        own[number] = what[2]
                        last_s = max(last_s, at_s)
                        if len(own) == self._args.agents and sum(own.values()) == num_members:
                            return float(last_s - (first_s or 0.0))
        raise TimeoutError("an agent does not get the next record")

    def all_hear(self) -> float:
        """Wait until every agent knows that others wait. Returns the seconds since the first one told it."""
        told_s: list[float] = []
        heard_s: list[float] = []
        end_s = time.monotonic() + _LIMIT_S
        while time.monotonic() < end_s:
            for pipe in multiprocessing.connection.wait(self._pipes, 1.0):
                assert isinstance(pipe, Connection)
                for at_s, number, what in pipe.recv():
                    if what[0] == "said":
                        print(f"agent {number}: {what[1]}", file=sys.stderr)
                    elif what[0] in ("tells", "heard"):
                        (told_s if what[0] == "tells" else heard_s).append(at_s)
            if len(heard_s) == self._args.agents:
                return max(heard_s) - min(told_s)
        raise TimeoutError("an agent does not hear what the others tell")

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()


class Deployment:
    """A coordinator with a fleet of its own, and what was measured of it."""

    def __init__(self, name: str, credentials: Credentials, directory: str, args: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self.name, self._args = name, args
        self._source = random.Random(args.seed)
        self.coordinator, there = context.Pipe()
        fields = credentials.to_json()
        self._process = context.Process(target=coordinator_process, args=(directory, fields, there), daemon=True)
        self._process.start()
        self.fleet = Fleet(self.coordinator.recv(), fields, args)
        self.changes: list[float] = []
        self.joins: list[float] = []
        self._sent: list[float] = []
        self._first_sent = 0.0
        self._used: list[float] = []

    def change(self, *, counts: bool) -> None:
        """A rank of a random agent is lost, and joins again."""
        whole = self._args.agents * self._args.ranks
        victim = self._source.randrange(self._args.agents)
        time.sleep(_PAUSE_S)
        before = _usage(self.coordinator)
        self.fleet.order(victim, "lose_rank")
        change_s = self.fleet.all_have(whole - 1)
        after = _usage(self.coordinator)
        time.sleep(_PAUSE_S)
        self.fleet.order(victim, "start_rank")
        join_s = self.fleet.all_have(whole)
        sent = (after[1] - before[1]) / self._args.agents
        if not counts:
            self._first_sent = sent
            return
        self.changes.append(change_s)
        self.joins.append(join_s)
        self._sent.append(sent)
        self._used.append(after[0] - before[0])

    def figures(self) -> Iterator[dict[str, Any]]:
        yield _figure("change_ms", self.changes)
        yield _figure("join_ms", self.joins)
        yield _figure("change_cpu_ms", self._used)
        yield {"figure": "sent_bytes", "count": len(self._sent), "mean": round(statistics.mean(self._sent))}
        yield {"figure": "first_sent_bytes", "mean": round(self._first_sent)}
        if self._args.agents > 1:
            before_s = _usage(self.coordinator)[0]
            for agent in range(self._args.agents):
                self.fleet.order(agent, "tell_others")
            yield _figure("facts_ms", [self.fleet.all_hear()])
            yield _figure("facts_cpu_ms", [_usage(self.coordinator)[0] - before_s])
        used_s, began_s = _usage(self.coordinator)[0], time.monotonic()
        time.sleep(self._args.idle)
        share = (_usage(self.coordinator)[0] - used_s) / (time.monotonic() - began_s)
        yield {"figure": "heartbeat_cpu", "percent": round(100 * share, 1), "seconds": self._args.idle}

    def close(self) -> None:
        self.fleet.close()
        self.coordinator.send("stop")
        self._process.join(20)


def measure(deployments: list[Deployment], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for deployment in deployments:
        deployment.fleet.all_have(args.agents * args.ranks)
    for number in range(args.changes + 1):  # the first one follows a record of learners, and is left out
        for deployment in deployments:
            deployment.change(counts=number > 0)
    for deployment in deployments:
        for figure in deployment.figures():
            yield {"with": deployment.name, **figure}
    if len(deployments) == 2:
        plain, tls = deployments
        for name in ("changes", "joins"):
            ratio = statistics.median(getattr(tls, name)) / statistics.median(getattr(plain, name))
            yield {"figure": "tls_ratio", "of": name, "ratio": round(ratio, 2)}


def make_tls() -> Tls:
    """A certificate of a CA that signs nothing else."""
    import trustme

    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    key = issued.private_key_pem.bytes().decode()
    chain = "".join(pem.bytes().decode() for pem in issued.cert_chain_pems)
    contents = TlsContents(chain, key, authority.cert_pem.bytes().decode())
    return Tls(TlsFiles("the bench's certificate", "its key", "its CA"), contents)


def _usage(coordinator: Connection) -> tuple[float, int]:
    coordinator.send("usage")
    found: tuple[float, int] = coordinator.recv()
    return found


def _figure(name: str, seconds: list[float]) -> dict[str, Any]:
    ms = sorted(1000 * value for value in seconds)
    return {"figure": name, "count": len(ms), "p50": round(statistics.median(ms), 1), "max": round(ms[-1], 1)}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench coordinator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--agents", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=8, help="of each (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=4, help="for the agents' sessions (default: %(default)s)")
    parser.add_argument("--changes", type=int, default=10, help="(default: %(default)s)")
    parser.add_argument("--idle", type=float, default=5.0, help="seconds of heartbeats (default: %(default)s)")
    parser.add_argument("--tls", action="store_true", help="compare with a coordinator and agents that speak TLS")
    parser.add_argument("--seed", type=int, default=0, help="of which agent loses a rank (default: %(default)s)")
    args = parser.parse_args()
    if min(args.agents, args.ranks, args.changes, args.processes) < 1:
        parser.error("there must be an agent, a rank, a change and a process at least")
    secret = Credentials(Secret(os.urandom(32)))
    with contextlib.ExitStack() as stack:
        deployments = []
        for name, credentials in [("secret", secret), ("tls", Credentials(tls=make_tls()))][: 1 + args.tls]:
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            deployments.append(Deployment(name, credentials, directory, args))
            stack.callback(deployments[-1].close)
        return print_figures("coordinator", {"agents": args.agents, "ranks": args.ranks}, measure(deployments, args))


if __name__ == "__main__":
    sys.exit(main())
