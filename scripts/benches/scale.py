"""What one step's vote and one generation change cost as hosts are added: messages, bytes, CPU of each part.

No network, one process, one core: the state machine of the coordinator decides, and what it would send is encoded and
decoded. docs/scale.md makes a model of these constants. Prints one JSON line per figure, for each number of hosts:

  vote          messages that one rank sends for one step, at most; those of all ranks; rounds one after another
  found         CPU of the coordinator for the first record, from the first agent to the last push; bytes of the record
  change        CPU of the coordinator for one lost rank, from the first report to the last push; bytes for each agent
  learn         CPU of one agent for what it is sent: to check it, and to make the text that its ranks read
  read          CPU of one rank for that text
  enter         CPU of one rank from the text of a record to the names of its groups, which it then connects; with
                replica groups of one rank, and of up to a quarter of the hosts
  step          the same for what it decides in one step, without the numbers that it sums
  keys          CPU of the coordinator for the rendezvous keys of the root group, from the first agent's message to the
                last one to an agent, with `--turn` messages read at a time; bytes that an agent sends and is sent, mean
                and most; messages to all agents. The key of a rank is as long as in a real group of 24.

`cpu_ms` is of one try, in milliseconds of one core; of `change`, `learn`, `read`, `enter` and `step` the median of
several.
"""

from __future__ import annotations

import argparse
import base64
import gc
import itertools
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from elasticgang.collectives.exchange import DIRECT_SIZE, rounds
from elasticgang.comm.agent_store import Peers
from elasticgang.coordinator.server import collect_rarely
from elasticgang.environment import ask_size
from elasticgang.layout import Member, ParallelLayout, Plan
from elasticgang.layout.rank_gangs import group_name, ranks_of_gang, reduction_gangs, user_gangs
from elasticgang.protocol import coordinator_messages as m
from elasticgang.protocol import member_instructions as do
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.coordinator_state import CoordinatorState
from elasticgang.protocol.end_cause import EndCause
from elasticgang.protocol.member_lifecycle import MemberLifecycle, Next, Routine
from elasticgang.protocol.record import ACTIVE, LEARNER, Record, Seat
from elasticgang.protocol.rendezvous_keys import Asked, Key, KeyExchange, RendezvousKeys
from elasticgang.protocol.sum_route import sum_route
from elasticgang.session.messages import decode_from_agent, decode_from_coordinator, encode, encode_delta
from elasticgang.torch_private import gloo_device, gloo_keys, new_gloo
from scripts.benches.coordinator import report_of
from scripts.figures import print_figures

_DEFAULT_GC = gc.get_threshold()
_KEY_SIZE = 24  # of the group whose rendezvous keys are measured: larger than those that connect at once
_TIMEOUT = timedelta(seconds=60)
_MANY_STEPS = 10**9


class KeyCounter(Store):
    """The store of one process, which adds up what the ranks put."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: Any) -> None:
        with self._changed:
            self.values[key] = value.encode() if isinstance(value, str) else bytes(value)
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta = _TIMEOUT) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.values.keys() >= set(keys), timeout.total_seconds()):
                raise RuntimeError(f"no keys {set(keys) - self.values.keys()}")


def one_key() -> tuple[str, bytes]:
    """Name and value of what rank 0 puts for a Gloo group that connects when it is used (WORKER-5)."""
    store = KeyCounter()
    with ThreadPoolExecutor(_KEY_SIZE) as pool:
        groups = [
            pool.submit(new_gloo, store, rank, _KEY_SIZE, _TIMEOUT, gloo_device("127.0.0.1", lazy=True))
            for rank in range(_KEY_SIZE)
        ]
        made = [group.result() for group in groups]
    for group in made:
        group.abort()
    assert len(store.values) == _KEY_SIZE
    return next((name, value) for name, value in store.values.items() if name.endswith("/0"))


class Job:
    """A coordinator without a network, and the agents' knowledge."""

    def __init__(self, num_hosts: int, num_ranks: int) -> None:
        self._num_hosts, self._num_ranks = num_hosts, num_ranks
        self._members = [{rank: f"agent-{host:05}/{rank}/1" for rank in range(num_ranks)} for host in range(num_hosts)]
        self._num_started = 1
        self._fresh = {member for members in self._members for member in members.values()}
        self._state = CoordinatorState("c", granted=True)
        self._now_s = 0.0

    @property
    def record(self) -> Record:
        assert self._state.record is not None
        return self._state.record

    def _hear(self, session: int, message: Any) -> list[Any]:
        return list(self._state.handle(m.Received(session, message), self._now_s))

    def _reports(self) -> Iterator[tuple[int, Any]]:
        record = self._state.record
        own: dict[str, list[Seat]] = defaultdict(list)
        for seat in () if record is None else record.seats:
            own[seat.agent].append(seat)
        for host, members in enumerate(self._members):
            name = f"agent-{host:05}"
            yield host, report_of(name, members, self._fresh, record, own[name], self._num_ranks, self._num_hosts)

    def _decide(self) -> tuple[float, list[m.Push]]:
        """All agents report. Returns the CPU seconds and what is pushed."""
        reports = list(self._reports())
        said: list[Any] = []
        began_s = time.process_time()
        for host, report in reports:
            said += self._hear(host, m.Ready(report))
        while not (pushes := [each.message for each in said if isinstance(getattr(each, "message", None), m.Push)]):
            self._now_s += 0.5
            for host in range(self._num_hosts):
                said += self._hear(host, m.Heartbeat(1))
            said += self._state.handle(m.Ticked(), self._now_s)
        used_s = time.process_time() - began_s
        self._fresh.clear()
        assert len(pushes) == self._num_hosts
        return used_s, pushes

    def found(self) -> tuple[float, m.Push]:
        began_s = time.process_time()
        for host in range(self._num_hosts):
            name = f"agent-{host:05}"
            self._hear(host, m.Hello(name, name, 1))
            self._hear(host, m.Promise(self._state.office.term))
        used_s = time.process_time() - began_s
        decided_s, pushes = self._decide()
        return used_s + decided_s, pushes[0]

    def lose(self, host: int) -> tuple[float, m.Push]:
        del self._members[host][self._num_ranks - 1]
        return self._change(host, m.EndGeneration(self.record.generation, EndCause("a rank is lost")))

    def restart(self, host: int) -> tuple[float, m.Push]:
        self._num_started += 1
        member = f"agent-{host:05}/{self._num_ranks - 1}/{self._num_started}"
        self._members[host][self._num_ranks - 1] = member
        self._fresh.add(member)
        return self._change(host, m.JoinRequest(self.record.generation))

    def _change(self, host: int, notice: Any) -> tuple[float, m.Push]:
        began_s = time.process_time()
        self._hear(host, notice)
        used_s = time.process_time() - began_s
        decided_s, pushes = self._decide()
        return used_s + decided_s, pushes[0]


class Rank:
    """One rank's state machine, in a job of `num_ranks` on each of `num_hosts`. The first `num_learners` ranks are
    learners, the others are active."""

    def __init__(self, num_hosts: int, num_ranks: int, layout: ParallelLayout, num_learners: int = 0) -> None:
        agents = tuple(f"agent-{host:05}" for host in range(num_hosts))
        names = [Member(f"{agent}/{rank}/1", agent) for agent in agents for rank in range(num_ranks)]
        plan = Plan((layout.pp, len(names) // layout.unit, layout.sdp, layout.tp), tuple(names))
        statuses = [LEARNER] * num_learners + [ACTIVE] * (len(names) - num_learners)
        seats = tuple(
            Seat(member.id, member.host, member.host, at % num_ranks, "10.0.0.1:1", status)
            for at, (member, status) in enumerate(zip(names, statuses, strict=True))
        )
        record = Record("job", 1, "", layout, plan, seats, agents, Attempt(0, 0), addresses=("10.0.0.1:2",) * num_hosts)
        self._text, self._size, self._layout = record.text, plan.size, layout
        self._sent: Sequence[float] = ()
        self.lifecycle = MemberLifecycle(names[plan.size // 2].id, 0, "10.0.0.1:1")

    def enter(self) -> None:
        self._run(self.lifecycle.pass_boundary(_MANY_STEPS))

    def step(self) -> None:
        lifecycle = self.lifecycle
        assert self._run(lifecycle.pass_boundary(_MANY_STEPS)) is Next.STEP
        self._run(lifecycle.begin())
        assert self._run(lifecycle.commit(1.0, measures=False))
        self._run(lifecycle.end(None))

    def _run(self, routine: Routine[Any]) -> Any:
        outcome: Any = None
        while True:
            try:
                outcome = self._perform(routine.send(outcome))
            except StopIteration as end:
                return end.value

    def _perform(self, instruction: do.Instruction) -> Any:
        match instruction:
            case do.Do.AWAIT_RECORD:
                return Record.from_text(self._text)
            case do.Configure(record):
                rank = record.plan.ranks[self.lifecycle.state.member]
                sum_route(record, rank)
                for name in (*user_gangs(self._layout), *reduction_gangs(self._layout)):
                    group_name(ranks_of_gang(record.plan, rank, name), name)
            case do.StartSum(gang, values):
                if gang == "control":
                    failed, joins, num_successors, *named = values[:6]
                    self._sent = [failed, joins, num_successors, *(self._size * each for each in named), *values[6:]]
                else:
                    self._sent = [self._size * values[0], *values[1:]]
            case do.Do.AWAIT_SUMS:
                return self._sent
        return None


def ranks(num_hosts: int, num_ranks: int) -> Iterator[dict[str, Any]]:
    sdp = max((size for size in range(1, num_hosts // 4 + 1) if num_hosts % size == 0), default=1)
    for layout in (ParallelLayout(), ParallelLayout(sdp=sdp, tp=num_ranks)):
        rank = Rank(num_hosts, num_ranks, layout)
        for name, function, num in (("enter", rank.enter, 1), ("step", rank.step, 20)):
            used = [_cpu_s(function) for _ in range(num)]
            yield {"figure": name, "layout": layout.sizes, "cpu_ms": round(1000 * statistics.median(used), 3)}


def _cpu_s(function: Callable[[], object]) -> float:
    began_s = time.process_time()
    function()
    return time.process_time() - began_s


def vote(num_hosts: int) -> dict[str, Any]:
    """One rank of each host sends (ROUTE-1)."""
    if num_hosts <= DIRECT_SIZE:
        return {"sent": num_hosts - 1, "sent_by_all": num_hosts * (num_hosts - 1), "rounds": 1}
    of_hosts = [list(rounds(host, num_hosts)) for host in range(num_hosts)]
    sent = [sum(each.sends for each in found) for found in of_hosts]
    return {"sent": max(sent), "sent_by_all": sum(sent), "rounds": max(map(len, of_hosts))}


def decisions(num_hosts: int, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    job = Job(num_hosts, args.ranks)
    used_s, push = job.found()
    yield {"figure": "found", "cpu_ms": _ms([used_s]), "record_bytes": len(encode(push))}
    changed, learned, read, num_bytes = [], [], [], []
    for number in range(args.changes + 1):  # the first one follows a record of learners, and is left out
        for change in (job.lose, job.restart):
            parent = job.record
            used_s, push = change(number % num_hosts)
            began_s = time.process_time()
            delta = encode_delta(parent, push)
            payload = encode(push) if delta is None else delta
            used_s += time.process_time() - began_s
            if number == 0 or change == job.restart:
                continue
            gc.collect()
            gc.freeze()  # an agent and a rank have none of the coordinator's objects to look through
            gc.set_threshold(*_DEFAULT_GC)
            began_s = time.process_time()
            known = decode_from_coordinator(payload, parent)
            assert isinstance(known, m.Push)
            text = known.decision.record.text
            learned.append(time.process_time() - began_s)
            began_s = time.process_time()
            record = Record.from_text(text)
            assert record.digest == push.decision.record.digest
            record.plan.coordinates(record.seats[0].member)
            read.append(time.process_time() - began_s)
            collect_rarely()
            gc.unfreeze()
            changed.append(used_s)
            num_bytes.append(len(payload))
    yield {"figure": "change", "cpu_ms": _ms(changed), "sent_bytes": round(statistics.median(num_bytes))}
    yield {"figure": "learn", "cpu_ms": _ms(learned)}
    yield {"figure": "read", "cpu_ms": _ms(read), "text_bytes": len(text)}


def keys(num_hosts: int, num_ranks: int, turn: int, key: tuple[str, bytes]) -> dict[str, Any]:
    """Of the root group. If it is large, each rank asks for the keys of those that it connects to first
    (AGENT-STORE-2)."""
    name, value = key
    coded, world = base64.b64encode(value).decode(), num_hosts * num_ranks
    prefix, group = f"job/1/{'0' * 64}", group_name(tuple(range(world)), "root")

    def message_of(host: int) -> bytes:
        own = range(host * num_ranks, (host + 1) * num_ranks)
        put = tuple(Key(group, gloo_keys(name, 0, [rank])[0], coded) for rank in own)
        if world <= ask_size():
            return encode(RendezvousKeys(prefix, (group,), put))
        peers = {peer for rank in own for peer in Peers(rank, world).first() if peer not in own}
        return encode(RendezvousKeys(prefix, (), put, (Asked(group, tuple(gloo_keys(name, 0, sorted(peers)))),)))

    exchange: KeyExchange[int] = KeyExchange(prefix)
    outbox: dict[int, list[Key]] = defaultdict(list)
    sent, received, num_messages, used_s = Counter[int](), Counter[int](), 0, 0.0
    for begin in range(0, num_hosts, turn):
        messages = [(host, message_of(host)) for host in range(begin, min(begin + turn, num_hosts))]
        began_s = time.process_time()
        for host, payload in messages:
            message = decode_from_agent(payload)
            assert isinstance(message, RendezvousKeys)
            sent[host] = len(payload)
            for other, found in exchange.take(host, message.groups, message.keys, message.asked).items():
                outbox[other] += found
        for other, found in outbox.items():
            received[other] += len(encode(RendezvousKeys(prefix, (), tuple(found))))
        num_messages += len(outbox)
        outbox.clear()
        used_s += time.process_time() - began_s
    assert not exchange.awaited()
    return {
        "figure": "keys",
        "cpu_ms": _ms([used_s]),
        "bytes_of_agent": round(sent.total() / num_hosts),
        "bytes_to_agent": round(received.total() / num_hosts),
        "most_bytes_to_agent": max(received.values()),
        "messages": num_messages,
    }


def _ms(seconds: list[float]) -> float:
    return round(1000 * statistics.median(seconds), 1)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[10, 100, 1000], help="(default: 10 100 1000)")
    parser.add_argument("--ranks", type=int, default=8, help="of each host (default: %(default)s)")
    parser.add_argument("--changes", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--turn", type=int, default=16, help="messages of agents with keys (default: %(default)s)")
    args = parser.parse_args()
    if min(*args.hosts, 2) < 2 or min(args.ranks, args.changes, args.turn) < 1:
        parser.error("there must be two hosts, a rank and a change at least")
    key = one_key()
    collect_rarely()  # as the coordinator does
    figures = itertools.chain.from_iterable(
        (
            {"hosts": num_hosts, **figure}
            for figure in itertools.chain(
                [{"figure": "vote", **vote(num_hosts)}, keys(num_hosts, args.ranks, args.turn, key)],
                decisions(num_hosts, args),
                ranks(num_hosts, args.ranks),
            )
        )
        for num_hosts in args.hosts
    )
    return print_figures("scale", {"ranks": args.ranks}, figures)


if __name__ == "__main__":
    sys.exit(main())
