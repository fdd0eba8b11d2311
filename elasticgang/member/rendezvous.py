"""A rank's way from one generation to the next: abort, request, act, configure.

The training thread alone uses it, but for what is marked: the link's thread brings aborts and join notices, the comm
process's reader brings errors.

RENDEZVOUS-1  Before this rank requests, its comm process of the old generation is dead, or has closed its groups
    (RULE-3): the training thread waits for that in `_leave_generation`. The link's thread only marks the generation and
    sends the kill signal.
RENDEZVOUS-2  After its request, it takes part in no older generation (RULE-9): the groups have ended and the gangs are
    unbound.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Protocol

import torch

from elasticgang.comm.arena import Arena
from elasticgang.comm.comm_process import CommProcess, GroupSpec
from elasticgang.comm.group_set import GroupSet
from elasticgang.comm.kinds import DEFAULT_PROCESS_GROUP
from elasticgang.comm.standby_pool import CommLauncher
from elasticgang.errors import (
    CollectiveTimeoutError,
    EvictedError,
    GangError,
    LayoutError,
    OperationalError,
    PeerLostError,
    StepAborted,
)
from elasticgang.gang import FakeGang, Gang, Gangs, create_fake_gangs
from elasticgang.gang.elastic import Binding, ElasticGang, Group
from elasticgang.layout import RUNTIME_GANGS, Member, ParallelLayout, plan
from elasticgang.member.agent_link import AgentLink
from elasticgang.member.drain import Drain, Drained
from elasticgang.member.generation import Generation
from elasticgang.member.rank_context import RankContext
from elasticgang.member.torch_environment import TorchEnvironment
from elasticgang.process.forkserver import ForkServerClient
from elasticgang.process.lease import Lease
from elasticgang.process.status_page import StatusPage, ThreadState
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.record import ACTIVE, SPARE, MemberReport, Record, Seat, layout_to_json
from elasticgang.testing import reached

if TYPE_CHECKING:
    from torchft.process_group import ProcessGroup

    from elasticgang.comm.data_groups import DataGroups

FAMILIES = ("root", "dp", "rdp", "sdp", "tp", "pp")
CONTROL, REDUCE, REDUCE_RDP = RUNTIME_GANGS  # for gradients alone; a user's collectives in a step keep their own order
_VOTING = (CONTROL, "root")
_RUNTIME_FAMILIES = {CONTROL: "root", REDUCE: "dp", REDUCE_RDP: "rdp"}

log = logging.getLogger("elasticgang")

_COMM_TIMEOUT_S = 200.0  # with a fork server of this rank's own, and each start's own limit, it may take that long


def master_host(record: Record) -> str:
    """Where the rank 0 of a record's generation can be reached."""
    leader = next(member for member, rank in record.plan.ranks.items() if rank == 0)
    seat = record.seat(leader)
    assert seat is not None
    return seat.address.rpartition(":")[0].strip("[]") or "localhost"


def why_spare(record: Record, member: str) -> str:
    """In words."""
    spares, unit, num_groups = record.plan.spares, record.layout.unit, record.plan.shape[1]
    groups = f"{num_groups} replica group{'' if num_groups == 1 else 's'}" + (f" of {unit}" if unit > 1 else "")
    turn = f"number {spares.index(member) + 1} of {len(spares)}" if len(spares) > 1 else "the only one"
    return f"{record.plan.size} ranks fill {groups}; it takes the seat of one that is lost, as {turn} that waits"


class Rendezvous(Protocol):
    """What the manager needs to take part. Two kinds: `ElasticRendezvous`, and `LocalRendezvous` without an agent."""

    member: str
    local_rank: int
    page: StatusPage
    drain: Drain

    @property
    def gangs(self) -> Gangs: ...

    def reduction(self, family: str) -> Gang:
        """The ranks of `gangs.dp`, or of `gangs.rdp`, with a group of its own, which only gradients use: ranks without
        slots reduce later in their program than the others, so that the order among a user's collectives would
        differ."""

    @property
    def record(self) -> Record | None: ...

    @property
    def error(self) -> GangError | None:
        """Why the present generation is over; None while it is sound or there is none."""

    @property
    def join_noticed(self) -> bool: ...

    def next_generation(self, report: Callable[[], MemberReport], act: Callable[[Record, Seat], None]) -> None:
        """Leave the present generation and block until the next is entered. `report` is what to ask with, `act` brings
        this rank's own state to the record's committed attempt."""

    def start_sum(self, gang: str, values: Sequence[float]) -> Callable[[], list[float]]:
        """Sum over the gang ("control" for all seats, apart from the tensors' traffic). What is returned waits for the
        sums, the same on all ranks, and raises GangError."""

    def forbid_collectives(self) -> AbstractContextManager[None]:
        """Until it ends, collectives of the gangs raise InvalidOperationError."""

    def poison(self, error: GangError) -> None: ...

    def committed(self, step: int, generation: int) -> None:
        """The agent is told of the first one of each generation, and reads the others when it needs them."""

    def healed(self) -> None:
        """This rank has loaded the committed state."""

    def leave(self, finished: bool, in_order: bool, num_steps: int) -> None:
        """Say that this rank takes part no more, then end its comm processes. `in_order`: at a boundary that the others
        come to as well; `num_steps`: that it was to do."""


class ElasticRendezvous:
    """A member of a job with an agent."""

    def __init__(
        self,
        context: RankContext,
        layout: ParallelLayout,
        device: torch.device,
        process_group: str | Callable[[], ProcessGroup] | None = None,
    ) -> None:
        """`process_group`: see `join`; None is what the agent was given."""
        self.member, self.local_rank = context.member, context.local_rank
        self._context = context
        self._layout = layout
        self._families = (*FAMILIES, *layout.further_axes)
        self._reductions = (REDUCE, REDUCE_RDP) if layout.sdp > 1 else (REDUCE,)  # else dp and rdp are the same
        self._elastic = {name: ElasticGang(name, device) for name in (*self._families, *self._reductions)}
        self._gangs: Gangs | None = None  # of the generation entered last
        self._torch_environment = TorchEnvironment()
        self._generation: Generation | None = None
        self._aborted = (0, "")  # written by the link's thread: the newest generation that is over, and why
        self._joining = 0
        self.drain, self.page = context.drain, context.drain.page
        self._lease = Lease(context.lease)
        self._comm_launcher = CommLauncher(ForkServerClient(socket.socket(fileno=context.forks)))
        self._groups = GroupSet(lambda: self._comm_launcher.start(self._make_process), on_stuck=self._end_rank)
        self._data = self._make_data_groups(process_group or context.process_group, device)
        self._reported_generation = 0  # the generation of which the agent has heard a commit
        self._link = AgentLink(context.link, context.store, on_abort=self._on_abort, on_join=self._on_join)
        self._link.send("joined")
        self.drain.wake = lambda: self._link.records.put(None)
        os.register_at_fork(after_in_child=self._close_in_child)

    @property
    def gangs(self) -> Gangs:
        """One object for each generation; between two, and after the last, that of the generation before.

        Raises:
            InvalidOperationError: no generation was entered yet.
        """
        return self._gangs or self._snapshot()

    def _snapshot(self) -> Gangs:
        root, dp, rdp, sdp, tp, pp = (self._elastic[name] for name in FAMILIES)
        further = {name: self._elastic[name] for name in self._layout.further_axes}
        return Gangs(root=root, dp=dp, rdp=rdp, sdp=sdp, tp=tp, pp=pp, further=further)

    def reduction(self, family: str) -> Gang:
        return self._elastic[REDUCE_RDP if family == "rdp" and REDUCE_RDP in self._elastic else REDUCE]

    @property
    def record(self) -> Record | None:
        return None if self._generation is None else self._generation.record

    @property
    def error(self) -> GangError | None:
        return None if self._generation is None else self._generation.error

    @property
    def join_noticed(self) -> bool:
        return self._generation is not None and self._joining == self._generation.record.generation

    def poison(self, error: GangError) -> None:
        if self._generation is not None:
            self._generation.fail(error)

    @contextlib.contextmanager
    def forbid_collectives(self) -> Iterator[None]:
        for gang in self._elastic.values():
            gang.collectives_forbidden = True
        try:
            yield
        finally:
            for gang in self._elastic.values():
                gang.collectives_forbidden = False

    def committed(self, step: int, generation: int) -> None:
        self._groups.prepare()  # not before the first commit: the survivors need the cores for that
        self.page.commit(step, generation)
        if generation != self._reported_generation:
            self._reported_generation = generation
            self._link.send("committed", step=step, generation=generation)

    def healed(self) -> None:
        assert self._generation is not None
        self._link.send("healed", generation=self._generation.record.generation)

    def start_sum(self, gang: str, values: Sequence[float]) -> Callable[[], list[float]]:
        generation = self._generation
        assert generation is not None
        ranks = self._ranks_of(generation, gang)
        if len(ranks) == 1:
            return lambda: list(values)
        # All messages cross at once, where those of a ring wait for each other; and all sum in the same order.
        mine = torch.tensor([values] * len(ranks), dtype=torch.float64)
        of_all = torch.empty_like(mine)
        name = self._group_name(ranks, gang)
        work = generation.groups.comm.submit(name, "alltoall_single", [of_all], [mine])

        def wait() -> list[float]:
            try:
                work.wait(self._context.collective_timeout)
            except GangError as error:
                generation.fail(error)
                raise
            if self._lease.is_expired:  # others may hold this host to be lost: nothing may come of it any more
                os.killpg(0, signal.SIGKILL)
            return [sum(column) for column in zip(*of_all.tolist(), strict=True)]

        return wait

    def next_generation(self, report: Callable[[], MemberReport], act: Callable[[Record, Seat], None]) -> None:
        with self.page.in_thread_state(ThreadState.REQUESTING):
            self._next_generation(report, act)
        self.page.set_thread_state(ThreadState.USER_CODE)
        reached("entered")

    def _next_generation(self, report: Callable[[], MemberReport], act: Callable[[Record, Seat], None]) -> None:
        while True:
            phases = {"began": time.monotonic()}
            error, had_part = self.error, self._generation is not None
            why = {"broken": error is not None, "timed_out": isinstance(error, CollectiveTimeoutError)}
            self._leave_generation()
            phases["aborted"] = time.monotonic()
            reached("requesting")
            self._link.send("request", report=asdict(report()), layout=layout_to_json(self._layout), **why)
            reached("requested")
            record, seat = self._next_seat(act, had_part)
            phases["agreed"] = time.monotonic()
            act(record, seat)
            phases["resolved"] = time.monotonic()
            reached("configuring")
            if not self._configure(record, seat):
                self._groups.prepare()
            else:
                phases["configured"] = time.monotonic()
                self._link.send("entered", phases={"generation": record.generation, **phases})
                return

    def leave(self, finished: bool, in_order: bool, num_steps: int) -> None:
        if not self._link.is_job_over:
            by_script = self.drain.requested and not self.drain.by_signal
            self._link.send("left", finished=finished, in_order=in_order, by_script=by_script, num_steps=num_steps)
        self.page.set_thread_state(ThreadState.LEFT)
        self._leave_generation()
        for gang in self._elastic.values():
            gang.close()
        if self._data is not None:
            self._data.close()
        self._groups.close()

    def _next_seat(self, act: Callable[[Record, Seat], None], had_part: bool) -> tuple[Record, Seat]:
        """Wait for a record with an active or learning seat. A spare acts on each record, and waits on; its standby
        waits with it.

        Raises:
            SystemExit: the job has finished. This rank has no part in what it led to: it ends, with code 0.
            Drained: it is to go, and had no part before.
        """
        while True:
            if self.drain.requested and not had_part:
                raise Drained
            record = self._link.records.get()
            if record is None:
                if not self._link.is_job_over:
                    continue  # woken
                log.info("the job has finished; %s has waited as a spare, and ends", self.member)
                raise SystemExit(0)
            seat = record.seat(self.member)
            if seat is None:
                raise EvictedError(f"generation {record.generation} has no seat for {self.member}")
            if seat.status != SPARE:
                self.page.set_thread_state(ThreadState.REQUESTING)
                return record, seat
            act(record, seat)
            had_part = False
            self.page.set_thread_state(ThreadState.SPARE)
            self._report_spare(record)

    def _report_spare(self, record: Record) -> None:
        reason = why_spare(record, self.member)
        log.info("rank %d waits as a spare in generation %d: %s", self.local_rank, record.generation, reason)
        self._link.send("spare", generation=record.generation, reason=reason)

    def _leave_generation(self) -> None:
        """RENDEZVOUS-1."""
        self._generation = None
        self.page.use(None)
        for gang in self._elastic.values():
            gang.bind(None)
        if self._data is not None:
            self._data.leave()
        self._groups.leave()

    def _configure(self, record: Record, seat: Seat) -> bool:
        """Configure all gangs of the generation in one round. False: it ended before it began."""
        groups = self._groups.open(_COMM_TIMEOUT_S)
        data = None
        if self._data is not None:
            data = self._data.open(groups.comm.block)
            groups.on_end = data.kill
        generation = Generation(record, seat, record.plan.ranks[self.member], groups, data)
        self._generation = generation
        self.page.use(groups.comm.block)
        specs: dict[str, GroupSpec] = {}
        firsts: dict[str, str] = {}  # the gang that the group of several is named after
        for name in (*self._families, CONTROL, *self._reductions):
            ranks = self._ranks_of(generation, name)
            if len(ranks) > 1:
                group = self._group_name(ranks, name)
                specs.setdefault(group, GroupSpec(group, ranks.index(generation.rank), len(ranks)))
                firsts.setdefault(group, name)
        if self._aborted[0] >= record.generation:  # the abort came before there was anything to poison
            generation.fail(PeerLostError(self._aborted[1]))
            return False
        try:
            if data is None:
                groups.connect(generation.prefix, list(specs.values()), store=self._link.store)
            else:  # votes and totals alone
                voting = [specs[group] for group in firsts if firsts[group] in _VOTING]
                groups.connect(generation.prefix, voting, store=self._link.store)
                for group, name in firsts.items():
                    if name != CONTROL:
                        self._connect_data(generation, name, specs[group])
        except GangError as error:
            generation.fail(error)
            return False
        self.page.entered(record.generation)
        for name, gang in self._elastic.items():
            ranks = self._ranks_of(generation, name)
            place = ranks.index(generation.rank)
            if len(ranks) == 1:
                gang.bind(Binding(place, ranks, None))
                continue
            bound = self._bound(generation, specs[self._group_name(ranks, name)])
            gang.bind(Binding(place, ranks, bound, functools.partial(self._make_group, generation)))
        self._gangs = self._snapshot()
        self._torch_environment.follow(self._gangs, master_host(record))
        return True

    def _connect_data(self, generation: Generation, name: str, spec: GroupSpec) -> None:
        assert generation.data is not None
        address = f"{self._link.store}/{generation.prefix}/data/{spec.name}"
        generation.data.connect(name, address, self.member, spec, generation.record.generation)

    def _bound(self, generation: Generation, spec: GroupSpec) -> Group:
        """The group of that name, as a gang holds it."""
        from elasticgang.comm.error_swallowing import SwallowingProcessGroup
        from elasticgang.comm.isolated import SharedProcessGroup

        if generation.data is None:
            shared = SharedProcessGroup(generation.groups, spec)
            return SwallowingProcessGroup(shared, start=shared.start, owner=generation)
        pg = generation.data.group(spec.name)
        start = functools.partial(generation.data.start, spec.name)
        return SwallowingProcessGroup(pg, start=start, owner=generation)

    def _make_group(self, generation: Generation, name: str, ranks: Sequence[int]) -> Group:
        """For `ElasticGang.create_gang`."""
        if generation.error is not None:
            raise StepAborted(f"the gang {name} cannot be made: {generation.error}")
        spec = GroupSpec(name, list(ranks).index(generation.rank), len(ranks))
        try:
            if generation.data is None:
                generation.groups.add(generation.prefix, spec, store=self._link.store)
            else:
                self._connect_data(generation, name, spec)
        except GangError as error:
            generation.fail(error)
            raise
        return self._bound(generation, spec)

    def _ranks_of(self, generation: Generation, name: str) -> tuple[int, ...]:
        """The ranks of this rank's gang of that family or further axis."""
        family = _RUNTIME_FAMILIES.get(name, name)
        return next(ranks for ranks in generation.record.plan.groups(family) if generation.rank in ranks)

    @staticmethod
    def _group_name(ranks: tuple[int, ...], name: str) -> str:
        """Gangs of the same ranks share a process group; the runtime's own do not. Each name has the ranks in it:
        groups of one name would meet under the same keys, and connect to each other."""
        among = "-".join(map(str, ranks))
        return f"{name}:{among}" if name in _RUNTIME_FAMILIES else among

    def _on_abort(self, number: int, reason: str) -> None:
        """On the link's thread, which must not wait: further notices and the next record come by it."""
        self._aborted = (number, reason)
        reached("abort_noticed")
        generation = self._generation
        if generation is not None and generation.record.generation <= number:
            generation.groups.kill(PeerLostError(reason))

    def _on_join(self, number: int) -> None:
        """On the link's thread."""
        self._joining = number

    def _make_data_groups(
        self, process_group: str | Callable[[], ProcessGroup], device: torch.device
    ) -> DataGroups | None:
        if process_group == DEFAULT_PROCESS_GROUP:
            return None
        from elasticgang.comm.data_groups import DataGroups
        from elasticgang.comm.in_process import create_process_group

        timeout = self._context.collective_timeout
        make = process_group if callable(process_group) else lambda: create_process_group(process_group, timeout)
        return DataGroups(make, device, timeout, self._end_rank)

    def _make_process(self, client: ForkServerClient, arena: Arena) -> CommProcess:
        return CommProcess(
            client,
            arena,
            store=self._context.store,
            host=self._context.host,
            timeout=self._context.collective_timeout,
            group=os.getpgid(0),
            name=f"eg-comm-{self._context.local_rank}",
            page=self.page,
        )

    def _end_rank(self, stuck: OperationalError) -> None:
        """RULE-3: what cannot be fenced off must not go on beside a new generation."""
        print(f"elasticgang: {self.member} ends itself: {stuck}", file=sys.stderr, flush=True)
        os.killpg(0, signal.SIGKILL)

    def _close_in_child(self) -> None:
        """A forked child (a DataLoader worker) keeps none of the runtime's descriptors open."""
        from elasticgang.member.rank_context import disinherit

        disinherit()
        generation = self._generation
        descriptors = {self._context.link, *self._comm_launcher.descriptors()}
        if generation is not None:
            descriptors.update(generation.groups.comm.descriptors())
        for descriptor in descriptors:
            with contextlib.suppress(OSError):  # -1, or closed by another thread at this moment
                os.close(descriptor)


class LocalRendezvous:
    """The only member of a job without agent, coordinator or subprocess."""

    member = "alone"
    local_rank = 0

    def __init__(self, layout: ParallelLayout, device: torch.device) -> None:
        if layout.num_needed > 1:
            raise LayoutError(
                f"the layout ({layout.sizes}) needs {layout.num_needed} ranks, but this process is alone; start it "
                f"with `elasticgang run --nproc-per-node {layout.num_needed} ...`."
            )
        self._layout = layout
        self._planned = plan([Member(self.member, "localhost")], layout)
        fakes = {name: FakeGang(device) for name in layout.further_axes}
        self.gangs = replace(create_fake_gangs(device), further=fakes)
        self.record: Record | None = None
        self.error: GangError | None = None
        self.join_noticed = False
        self.page = StatusPage()
        self.drain = Drain(self.page)
        self._torch_environment = TorchEnvironment()

    def next_generation(self, report: Callable[[], MemberReport], act: Callable[[Record, Seat], None]) -> None:
        seat = Seat(self.member, self.member, "localhost", 0, "", ACTIVE)
        tip = report().tip or Attempt(0, 1)
        self.record = Record("alone", 1, "", self._layout, self._planned, (seat,), (self.member,), tip)
        self.error = None
        act(self.record, seat)
        self._torch_environment.follow(self.gangs, "localhost")

    def start_sum(self, gang: str, values: Sequence[float]) -> Callable[[], list[float]]:
        return lambda: list(values)

    def reduction(self, family: str) -> Gang:
        return self.gangs.dp

    def forbid_collectives(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def poison(self, error: GangError) -> None:
        self.error = error

    def committed(self, step: int, generation: int) -> None:
        pass

    def healed(self) -> None:
        pass

    def leave(self, finished: bool, in_order: bool, num_steps: int) -> None:
        pass
