"""How long a generation change takes with many agents of simulated ranks, against the real lighthouse and store.

Every agent is a process with everything that a real one has towards the coordinator and the other agents; its ranks
are simulated: they abort, ask and enter at once. A random rank of a random agent dies, and joins again, again and
again. Prints one JSON line per figure:

  change_ms   from the death to the last agent that has the next record: p50, max
  notice_ms   from the death to the last agent that has heard of it: p50, max
  join_ms     from the newcomer's question to the last agent that has the next record: p50, max
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import random
import selectors
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

os.environ.setdefault("RUST_LOG", "error")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # as `elasticgang run`

from elasticgang.agent.control_plane import ControlPlane, Limits
from elasticgang.coordinator.endpoint import Endpoint, reach
from elasticgang.layout import ParallelLayout
from elasticgang.protocol.agent_events import (
    Abort,
    AnnounceJoin,
    CoordinatorTimedOut,
    DeliverRecord,
    Event,
    Exited,
    Fail,
    LeaseExpired,
    RecordRequested,
    RequestQuorum,
    Restart,
    Started,
)
from elasticgang.protocol.agent_state import AgentState
from elasticgang.protocol.record import MemberReport, Record
from elasticgang.protocol.restarts import Restarts

_JOB = "bench"
_LIMIT_S = 60.0
_PAUSE_S = 0.3
_KILL, _START = b"k", b"s"
_LAYOUT = ParallelLayout()


class SimulatedAgent:
    """The side of `control_plane.Inside`, with ranks that are nothing but names."""

    def __init__(self, number: int, args: argparse.Namespace, endpoint: Endpoint, told: Callable[..., None]) -> None:
        self._told = told
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_started = 0
        self._dead: list[int] = []
        self._ranks: dict[str, MemberReport] = {}
        self._seated: set[str] = set()
        self.state = AgentState(
            agent=f"agent-{number:03}",
            host=f"host-{number:03}",
            job=_JOB,
            coordinator=endpoint.incarnation,
            restarts=Restarts(0),
            num_ranks=args.ranks,
            min_agents=args.agents,
        )
        self.control_plane = ControlPlane(self, endpoint, _JOB, Limits(10.0, 60.0), None)

    async def start(self) -> None:
        self.state.address = await self.control_plane.open()
        for local_rank in range(self.state.num_ranks):
            self._start(local_rank)

    def kill_coordinator(self) -> None: ...

    def kill_one(self) -> None:
        member = min(self._ranks)
        del self._ranks[member]
        self._told("died")
        self.handle(Exited(member, -signal.SIGKILL))

    def start_again(self) -> None:
        self._start(self._dead.pop())

    def _start(self, local_rank: int) -> None:
        self._num_started += 1
        member = f"{self.state.agent}/{local_rank}/{self._num_started}"
        self._ranks[member] = MemberReport(member, local_rank, "127.0.0.1:1")
        self.handle(Started(member, local_rank))
        if self.state.record is not None:
            self._told("joins")
        self._ask(member, broken=False)

    def _leave(self, members: tuple[str, ...], broken: bool) -> None:
        """The generation: a rank asks once."""
        for member in members:
            if member in self._seated:
                self._ask(member, broken)

    def _ask(self, member: str, broken: bool) -> None:
        self._seated.discard(member)
        self.handle(RecordRequested(member, self._ranks[member], _LAYOUT, broken))

    def handle(self, event: Event | LeaseExpired | CoordinatorTimedOut) -> None:
        if isinstance(event, LeaseExpired):
            raise AssertionError("there is no lease")
        if isinstance(event, CoordinatorTimedOut):
            self._fail(event.reason)
            return
        for instruction in self.state.handle(event):
            match instruction:
                case Abort(members, generation, reason):
                    self._told("noticed", generation=generation)
                    self.control_plane.broadcast_over(generation, reason)
                    self._leave(members, broken=True)
                case AnnounceJoin(members, generation):
                    self.control_plane.broadcast_join(generation)
                    self._leave(members, broken=False)  # at their step boundary
                case RequestQuorum(delay_s):
                    self.control_plane.request(delay_s)
                case DeliverRecord(members, record):
                    self._enter(members, record)
                case Restart(local_rank, _):
                    self._dead.append(local_rank)
                case Fail(_, reason):
                    raise RuntimeError(reason)
                case _:
                    raise AssertionError(instruction)

    def _enter(self, members: tuple[str, ...], record: Record) -> None:
        """A newcomer has healed by the time of the next change."""
        self._told("record", generation=record.generation, members=len(record.seats_of(self.state.agent)))
        self.control_plane.follow(record)
        self._seated.update(members)
        for member in members:
            mine = self._ranks[member]
            self._ranks[member] = MemberReport(
                mine.id, mine.local_rank, mine.address, record.committed, None, (0, 0, 0), record.generation, True
            )

    def spawn_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(repr(error))

    def _fail(self, reason: str) -> None:
        self._told("failed", reason=reason)

    def write_line(self, line: str) -> None:
        self._told("said", line=line)

    def on_peer_blocked(self, agent: str, waits: list[list[Any]]) -> None:
        pass

    def on_successors_changed(self) -> None: ...

    def log(self, event: str, **fields: Any) -> None:
        if event in ("host lost", "coordinator unreachable"):
            self._told("said", line=f"{event} {fields}")


def agent_process(number: int, args: argparse.Namespace, address: str, told: int, orders: int) -> None:
    out = os.fdopen(told, "w", buffering=1)

    def tell(what: str, **fields: Any) -> None:
        out.write(json.dumps({"t": time.monotonic(), "agent": number, "what": what, **fields}) + "\n")

    async def run() -> None:
        endpoint = await asyncio.to_thread(reach, address, 30.0)
        agent = SimulatedAgent(number, args, endpoint, tell)
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def on_order() -> None:
            order = os.read(orders, 1)
            if order == _KILL:
                agent.kill_one()
            elif order == _START:
                agent.start_again()
            else:
                loop.remove_reader(orders)
                ended.set_result(None)

        loop.add_reader(orders, on_order)
        await agent.start()
        await ended

    asyncio.run(run())


class Fleet:
    """The agents' processes, and what they tell."""

    def __init__(self, args: argparse.Namespace, address: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._orders: list[int] = []
        self._pids: list[int] = []
        self._told = self._listen()
        for number in range(args.agents):
            told, telling = os.pipe()
            orders, ordering = os.pipe()
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
                    for fd in (*self._orders, told, ordering):
                        os.close(fd)
                    agent_process(number, args, address, telling, orders)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            os.close(telling)
            os.close(orders)
            self._pids.append(pid)
            self._orders.append(ordering)
            self._selector.register(told, selectors.EVENT_READ, bytearray())

    def _listen(self) -> Iterator[dict[str, Any]]:
        """What they tell, as it comes."""
        while True:
            ready = self._selector.select(_LIMIT_S)
            if not ready:
                raise TimeoutError("an agent does not tell of the next generation")
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                if not data:
                    raise RuntimeError("an agent has ended")
                key.data.extend(data)
                *lines, rest = bytes(key.data).split(b"\n")
                key.data[:] = rest
                yield from map(json.loads, lines)

    def all_have(self, members: int) -> list[dict[str, Any]]:
        """Wait until all agents have the record of one generation that has so many members; what was told meanwhile."""
        heard: list[dict[str, Any]] = []
        having: dict[int, dict[int, int]] = {}
        for message in self._told:
            heard.append(message)
            if message["what"] in ("failed", "said"):
                print(message, file=sys.stderr)
            if message["what"] == "record":
                own = having.setdefault(message["generation"], {})
                own[message["agent"]] = message["members"]
                if len(own) == len(self._pids) and sum(own.values()) == members:
                    return heard
        raise AssertionError

    def order(self, agent: int, what: bytes) -> None:
        os.write(self._orders[agent], what)

    def close(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def measure(fleet: Fleet, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    source = random.Random(args.seed)
    whole = args.agents * args.ranks
    fleet.all_have(whole)
    changes, notices, joins = [], [], []
    for _ in range(args.changes):
        victim = source.randrange(args.agents)
        time.sleep(_PAUSE_S)
        fleet.order(victim, _KILL)
        heard = fleet.all_have(whole - 1)
        died = _first(heard, "died")
        changes.append(_last_record(heard) - died)
        notices.append(max(message["t"] for message in heard if message["what"] == "noticed") - died)
        time.sleep(_PAUSE_S)
        fleet.order(victim, _START)
        heard = fleet.all_have(whole)
        joins.append(_last_record(heard) - _first(heard, "joins"))
    yield _figure("change_ms", changes)
    yield _figure("notice_ms", notices)
    yield _figure("join_ms", joins)


def _first(heard: list[dict[str, Any]], what: str) -> float:
    return float(next(message["t"] for message in heard if message["what"] == what))


def _last_record(heard: list[dict[str, Any]]) -> float:
    newest = heard[-1]["generation"]
    return max(float(message["t"]) for message in heard if message.get("generation") == newest)


def _figure(name: str, seconds: list[float]) -> dict[str, Any]:
    ms = sorted(1000 * value for value in seconds)
    return {"figure": name, "count": len(ms), "p50": round(statistics.median(ms), 1), "max": round(ms[-1], 1)}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench agents", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--agents", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=8, help="of each (default: %(default)s)")
    parser.add_argument("--changes", type=int, default=10, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of who dies (default: %(default)s)")
    args = parser.parse_args()
    if min(args.agents, args.ranks, args.changes) < 1 or args.agents < 2:
        parser.error("there must be two agents, a rank and a change at least")
    command = [sys.executable, "-m", "elasticgang", "coordinator", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as coordinator:
        assert coordinator.stdout is not None
        address = coordinator.stdout.readline().split()[-1]
        fleet = Fleet(args, address)
        try:
            for figure in measure(fleet, args):
                load = round(os.getloadavg()[0], 2)
                shape = {"agents": args.agents, "ranks": args.ranks}
                print(json.dumps({"bench": "agents", **shape, **figure, "load": load}), flush=True)
        finally:
            fleet.close()
            coordinator.terminate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
