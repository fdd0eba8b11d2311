"""A rank's groups and its messages to the agent, from one generation to the next. `member_lifecycle.py` decides.

The training thread alone uses it, but for what is marked: the link's thread brings aborts and join notices, the comm
process's reader brings errors.

RENDEZVOUS-1  Once this rank has left a generation (LEAVE_GENERATION), the comm process of that generation is halted or
    dead, or has closed its groups (RULE-3), and the gangs are unbound (RULE-9). The link's thread only marks the
    generation and sends the signal.
RENDEZVOUS-2  On CUDA, the streams of this rank have then drained too: what was queued behind the collectives of that
    generation accesses no buffer any more. The time counts for the hang detector, because a device can hang.
RENDEZVOUS-3  The agent's notice halts the comm process, and the first commit of the next generation kills it (COMM-6):
    all agents of the generation get the notice, so that no rank learns of the end only by a closed connection. While
    the coordinator is away the ranks of other hosts do, after `HALTED_S` at most.
RENDEZVOUS-4  A rank for which no comm process can be started, because the host has no process or memory left, does not
    enter the generation: it ends it after `NO_MEMORY_S`, and tries again in the next one (MANAGER-17). As an error of
    the script, on two ranks of a host in one step, it would end the job. It is such an error where the job starts, and
    after `MAX_WITHOUT_FIRST_COMM` times on a host that joins, because the others wait for it. After `MAX_WITHOUT_COMM`
    times in a row it ends itself, as by a kill: what it lacks may be its own, such as threads of its script. Otherwise
    the others would all give up with it (MANAGER-17).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from elasticgang.comm.arena import Arena
from elasticgang.comm.comm_process import CommProcess, GroupSpec
from elasticgang.comm.group_set import Configuration, GroupSet
from elasticgang.comm.kinds import DEFAULT_PROCESS_GROUP
from elasticgang.comm.standby_pool import CommLauncher
from elasticgang.errors import (
    CollectiveTimeoutError,
    GangError,
    OperationalError,
    PeerLostError,
    StepAborted,
)
from elasticgang.gang import Gang, Gangs
from elasticgang.gang.bans import Ban, Bans
from elasticgang.gang.elastic import Binding, ElasticGang, Group
from elasticgang.gang.gangs import device_uuid, is_own_choice
from elasticgang.layout import ParallelLayout
from elasticgang.layout.rank_gangs import (
    CONTROL,
    GANGS,
    REDUCE,
    REDUCE_RDP,
    group_name,
    ranks_of_gang,
    reduction_gangs,
    user_gangs,
)
from elasticgang.member.agent_link import AgentDoor, AgentLink
from elasticgang.member.data_store import DataStore
from elasticgang.member.generation import Generation
from elasticgang.member.rank_context import RankContext
from elasticgang.member.stopped_at import stopped_at
from elasticgang.member.sums import NO_MEMORY_S, Sums
from elasticgang.member.torch_environment import TorchEnvironment
from elasticgang.process.forkserver import ForkServerClient
from elasticgang.process.late_signals import LONGEST_WAIT_S
from elasticgang.process.lease import Lease
from elasticgang.process.status_page import ThreadState
from elasticgang.process.sum_block import SumBlock
from elasticgang.protocol import member_instructions as do
from elasticgang.protocol.member_instructions import AbortNotice, Do, Instruction, Observed
from elasticgang.protocol.record import CheckpointRef, Record, Seat, layout_to_json
from elasticgang.protocol.shortened import has_line
from elasticgang.protocol.sum_route import SumRoute, sum_route
from elasticgang.testing import reached

if TYPE_CHECKING:
    from torchft.process_group import ProcessGroup

    from elasticgang.comm.data_groups import DataGroups

log = logging.getLogger("elasticgang")

MAX_WITHOUT_COMM, MAX_WITHOUT_FIRST_COMM = 50, 5  # generations in a row, RENDEZVOUS-4
_COMM_TIMEOUT_S = 200.0  # with a fork server of this rank's own, and each start's own limit, it may take that long


def master_host(record: Record) -> str:
    """Where the rank 0 of a record's generation can be reached."""
    leader = next(member for member, rank in record.plan.ranks.items() if rank == 0)
    seat = record.seat(leader)
    assert seat is not None
    return seat.address.partition(",")[0].rpartition(":")[0].strip("[]") or "localhost"


def why_spare(record: Record, member: str) -> str:
    """In words."""
    seat = record.seat(member)
    if seat is not None and (hosts := record.hosts_out_of_reach(seat.agent)):
        return f"this host and {', '.join(hosts)} do not reach each other"
    spares, unit, num_groups = record.plan.spares, record.layout.unit, record.plan.shape[1]
    groups = f"{num_groups} replica group{'' if num_groups == 1 else 's'}" + (f" of {unit}" if unit > 1 else "")
    turn = f"number {spares.index(member) + 1} of {len(spares)}" if len(spares) > 1 else "the only one"
    return f"{record.plan.size} ranks fill {groups}; it takes the seat of one that is lost, as {turn} that waits"


class ElasticRendezvous:
    """A member of a job with an agent."""

    def __init__(
        self,
        context: RankContext,
        layout: ParallelLayout,
        device: torch.device,
        process_group: str | Callable[[], ProcessGroup] = DEFAULT_PROCESS_GROUP,
    ) -> None:
        """`process_group`: see `join`."""
        self.member, self.local_rank = context.member, context.local_rank
        self._context, self.compare_state = context, context.compare_state
        self._layout, self._device = layout, device
        self._families, self._reductions = user_gangs(layout), reduction_gangs(layout)
        self._bans = Bans()
        names = (*self._families, *self._reductions)
        self._elastic = {name: ElasticGang(name, device, bans=self._bans) for name in names}
        self._gangs: Gangs | None = None  # of the generation entered last
        self._torch_environment = TorchEnvironment()
        self._generation: Generation | None = None
        self._aborted = AbortNotice()  # written by the link's thread, as is the next
        self._joining = 0
        self._connecting_s, self._has_timed_out = 0.0, False  # of the last generation that was not connected
        self._ended_elsewhere = False  # that one
        self._has_entered, self._num_without_comm = context.has_trained, 0  # RENDEZVOUS-4
        self._not_opened: GangError | None = None  # why there is no generation, though the record has a seat
        self._phases: dict[str, float] = {}  # of the change under way, and when each ended
        self.drain, self.page = context.drain, context.drain.page
        self._lease = Lease(context.lease)
        self._door = AgentDoor(context.door)
        self._comm_launcher = CommLauncher(ForkServerClient(socket.socket(fileno=context.forks)))
        self._groups = GroupSet(lambda: self._comm_launcher.start(self._make_process), on_stuck=self._end_rank)
        self._process_group = process_group if isinstance(process_group, str) else "made by a function"
        self._data = self._make_data_groups(process_group, device)
        self._link = AgentLink(context.link, on_abort=self._on_abort, on_join=self._on_join)
        self._data_store: DataStore | None = None  # of the present generation
        self._link.send("joined", device_uuid=device_uuid(device), has_chosen_device=is_own_choice(device))
        self.drain.wake = lambda: self._link.records.put(None)
        self._unsaved: int | None = None
        self._got_state = context.got_state
        self._stopped_at = ""  # in the last generation, if it has ended by an error
        self._lacks = ""  # what this rank lacks in the present generation, in words
        self._num_delays = 0  # since it has entered one
        os.register_at_fork(after_in_child=self._close_in_child)

    @property
    def gangs(self) -> Gangs:
        """One object for each generation; between two, and after the last, that of the generation before.

        Raises:
            InvalidOperationError: no generation was entered yet.
        """
        return self._gangs or self._snapshot()

    def _snapshot(self) -> Gangs:
        root, dp, rdp, sdp, tp, pp = (self._elastic[name] for name in GANGS)
        further = {name: self._elastic[name] for name in self._layout.further_axes}
        return Gangs(root=root, dp=dp, rdp=rdp, sdp=sdp, tp=tp, pp=pp, further=further)

    def reduction(self, family: str) -> Gang:
        return self._elastic[REDUCE_RDP if family == "rdp" and REDUCE_RDP in self._elastic else REDUCE]

    def empty(self, num: int, dtype: torch.dtype) -> Tensor:
        return (
            torch.empty(num, dtype=dtype, device="cpu")
            if self._data is not None
            else self._comm_launcher.empty(num, dtype)
        )

    @property
    def record(self) -> Record | None:
        return None if self._generation is None else self._generation.record

    @property
    def error(self) -> GangError | None:
        return self._not_opened if self._generation is None else self._generation.error

    @property
    def num_collectives(self) -> int:
        return sum(self._elastic[name].num_started for name in self._families)

    def observe(self) -> Observed:
        drain, link = self.drain, self._link
        return Observed(
            self.error,
            self._joining,
            drain.requested,
            drain.by_signal,
            link.is_job_over,
            self.page.successors,
            self._connecting_s,
            self._has_timed_out,
            self._ended_elsewhere,
        )

    def poison(self, error: GangError) -> None:
        if self._generation is not None:
            self._generation.fail(error)

    def check_reduction(self) -> None:
        if self._generation is not None:
            self._generation.check()

    def ban(self, ban: Ban | None) -> Ban | None:
        return self._bans.replace(ban)

    def start_sum(self, values: Sequence[float]) -> Callable[[], list[float]]:
        generation = self._generation
        assert generation is not None
        sums = generation.sums.start(values)

        def wait() -> list[float]:
            try:
                found = sums()
            except GangError as error:
                generation.fail(error)
                raise
            if self._lease.is_expired:  # others may hold this host to be lost: nothing may come of it any more
                os.killpg(0, signal.SIGKILL)
            return found

        return wait

    def tell_saved(self, ref: CheckpointRef, path: str, num_bytes: int, duration_s: float) -> None:
        attempt, digest = ref
        self._link.send(
            "saved",
            step=attempt.step,
            generation=attempt.generation,
            digest=digest,
            path=path,
            bytes=num_bytes,
            duration_s=round(duration_s, 3),
        )

    def tell_unsaved(self, step: int) -> None:
        self._unsaved = step

    def perform(self, instruction: Instruction) -> Record | None:
        match instruction:
            case Do.LEAVE_GENERATION:
                self._phases = {"began": time.monotonic()}
                self.page.set_thread_state(ThreadState.REQUESTING)
                self._leave_generation()
                self._phases["aborted"] = time.monotonic()
            case do.Delay():
                self._delay(instruction)
            case do.SendRequest():
                self._request(instruction)
            case Do.AWAIT_RECORD:
                return self._await_record()
            case do.ReportSpare(record):
                self.page.set_thread_state(ThreadState.SPARE)
                reason = why_spare(record, self.member)
                log.info("rank %d waits as a spare in generation %d: %s", self.local_rank, record.generation, reason)
                self._link.send("spare", generation=record.generation, reason=reason)
            case do.Configure(record, seat):
                self._configure(record, seat)
            case Do.REPORT_HEALED:
                assert self._generation is not None
                self._got_state()  # first: its children would keep what it has
                self._link.send("healed", generation=self._generation.record.generation)
            case do.ReportCommitted(attempt, announces):
                self._groups.prepare_when_due()  # nor before the first commit: the survivors need the cores for that
                self.page.commit(*attempt)
                if announces:
                    self._got_state()  # it may have held the state from the start
                    self._link.send("committed", step=attempt.step, generation=attempt.generation)
                self._groups.end_halted()
            case do.ReportDifference():
                self._link.send("state_differs", **asdict(instruction))
            case do.SendLeft():
                self._link.send("left", **asdict(instruction), unsaved=self._unsaved)
            case Do.CLOSE:
                self._close()
        return None

    def _request(self, request: do.SendRequest) -> None:
        error = request.error
        why = {"broken": error is not None, "timed_out": isinstance(error, CollectiveTimeoutError)}
        settings = {
            "number of steps": str(request.num_steps),
            "process group": self._process_group,
            "model": request.model,
            "--compare-state": f"{self.compare_state}{request.saves and f', with saves {request.saves}'}",
        }
        reached("requesting")
        self._link.send(
            "request",
            report=asdict(request.report),
            layout=layout_to_json(self._layout),
            checkpoint=request.checkpoint,
            settings=settings,
            left_step=isinstance(error, StepAborted),  # MANAGER-19
            connected=request.connected,
            lacks=self._lacks,
            stopped_at=self._stopped_at if error is not None else "",
            **why,
        )
        reached("requested")

    def _delay(self, delay: do.Delay) -> None:
        times = f"{delay.num} generations in a row" if delay.num > 1 else "the last generation"
        ends_at = time.monotonic() + delay.delay_s
        self._num_delays += 1
        log.log(
            logging.WARNING if has_line(self._num_delays) else logging.DEBUG,
            "the ranks of %s did not connect in %s; rank %d requests the next one in %g s (%s)",
            *(delay.hosts, times, self.local_rank, delay.delay_s, delay.error),
        )
        while not (self.drain.requested or self._link.is_job_over) and (left := ends_at - time.monotonic()) > 0:
            time.sleep(min(left, LONGEST_WAIT_S))

    def _await_record(self) -> Record | None:
        record = self._next_record()
        if record is not None:
            self.page.set_thread_state(ThreadState.REQUESTING)
            self._phases["agreed"] = time.monotonic()
            reached("record_received")
        elif self._link.is_job_over:
            log.info("the job has finished; %s has waited as a spare, and ends", self.member)
        return record

    def _next_record(self) -> Record | None:
        while True:
            with contextlib.suppress(queue.Empty):  # SIGNAL-LATE
                return self._link.records.get(timeout=LONGEST_WAIT_S)

    def _configure(self, record: Record, seat: Seat) -> None:
        """Configure all gangs of the generation in one round."""
        self._phases["resolved"] = time.monotonic()
        reached("configuring")
        generation = self._open(record, seat)
        try:
            if self._aborted.ends(record.generation):  # the abort came before there was anything to poison
                raise PeerLostError(self._aborted.reason)
            self._connect(generation)
        except GangError as error:
            self._connecting_s = time.monotonic() - self._phases["resolved"]
            notice = self._aborted if self._aborted.ends(record.generation) else AbortNotice()
            self._has_timed_out = notice.timed_out or isinstance(error, CollectiveTimeoutError)
            self._ended_elsewhere = notice.is_elsewhere
            generation.fail(error)
            if self._stopped_at:
                self._stopped_at = "while it connected to the other ranks"
            self._groups.prepare()
            raise
        self._phases["configured"] = time.monotonic()
        self._link.send("entered", phases={"generation": record.generation, **self._phases})
        self.page.set_thread_state(ThreadState.USER_CODE)
        reached("entered")
        self._has_entered, self._num_delays = True, 0

    def _close(self) -> None:
        self.page.set_thread_state(ThreadState.LEFT)
        self._leave_generation()
        for gang in self._elastic.values():
            gang.close()
        if self._data is not None:
            self._data.close()
        self._groups.close()

    def _leave_generation(self) -> None:
        """RENDEZVOUS-1."""
        generation, self._generation, self._not_opened = self._generation, None, None
        self.page.use(None)
        for gang in self._elastic.values():
            gang.bind(None)
        if self._data is not None:
            self._data.leave()
            self._data_store = None
        self._groups.leave()
        if generation is not None:
            generation.sums.close()
        if self._device.type == "cuda":  # RENDEZVOUS-2
            with self.page.in_thread_state(ThreadState.USER_CODE):
                torch.cuda.synchronize(self._device)

    def _open(self, record: Record, seat: Seat) -> Generation:
        """The generation, with groups that nothing connects yet. From here on an abort ends it."""
        self._stopped_at = self._lacks = ""
        groups = self._open_groups(record)
        data = None if self._data is None else self._data.open(groups.comm.block)
        rank = record.plan.ranks[self.member]
        sums = self._open_sums(record, rank, groups)

        def on_end(error: GangError) -> None:
            try:  # before the training thread goes on
                if groups.comm.block is not None:
                    under_way = groups.under_way if data is None else [*groups.under_way, *data.under_way()]
                    self._stopped_at = stopped_at(groups.comm.block, under_way, self.page.healing)
            except Exception:  # of a process group that is the script's own, for example: only a message lacks
                log.exception("it is not known where rank %d has stopped", self.local_rank)
            finally:
                sums.end()
                if data is not None:
                    data.kill(error)

        groups.on_end = on_end
        self._generation = Generation(record, seat, rank, groups, sums, data)
        self.page.use(groups.comm.block)
        return self._generation

    def _open_groups(self, record: Record) -> Configuration:
        """Raises GangError, or OperationalError where the job starts: there is no comm process (RENDEZVOUS-4)."""
        try:
            groups = self._groups.open(_COMM_TIMEOUT_S)
        except OperationalError as exc:
            starts = record.committed.step == 0 or record.checkpoint
            if not self._has_entered and (starts or self._num_without_comm >= MAX_WITHOUT_FIRST_COMM):
                raise
            level = logging.DEBUG if self._num_without_comm else logging.WARNING
            log.log(level, "rank %d has no comm process, and tries again: %s", self.local_rank, exc)
            self._num_without_comm += 1
            self._lacks = "comm process"
            if self._num_without_comm >= MAX_WITHOUT_COMM:
                self._end_rank(exc)
            self._connecting_s, self._has_timed_out, self._ended_elsewhere = NO_MEMORY_S, False, False
            time.sleep(NO_MEMORY_S)
            self._not_opened = PeerLostError(f"a rank has no comm process: {exc}")
            raise self._not_opened from exc
        self._num_without_comm = 0
        return groups

    def _open_sums(self, record: Record, rank: int, groups: Configuration) -> Sums:
        route = sum_route(record, rank)
        exchange = None
        if rank in route.firsts and len(route.firsts) > 1:
            place = route.firsts.index(rank)
            exchange = GroupSpec(group_name(route.firsts, CONTROL), place, len(route.firsts), CONTROL)
        name = group_name(tuple(range(record.plan.size)), CONTROL)
        block = self._take_block(record, route)
        return Sums(route, rank, name, exchange, groups, block, self._context.collective_timeout)

    def _take_block(self, record: Record, route: SumRoute) -> SumBlock | None:
        """The memory for the sums of this host's ranks. None: there is none, as SUMS-5 has it."""
        if not route.has_block:
            return None
        self._lacks = "memory for its votes"
        descriptor = self._door.take_block(record.digest)
        if descriptor is None:
            return None
        try:
            block = SumBlock(descriptor, len(route.local))
        except OSError:
            return None
        finally:
            os.close(descriptor)
        self._lacks = ""
        return block

    def _connect(self, generation: Generation) -> None:
        record, groups = generation.record, generation.groups
        specs: dict[str, GroupSpec] = {}
        firsts: dict[str, str] = {}  # the gang that the group of several is named after
        ranks_of = {name: ranks_of_gang(record.plan, generation.rank, name) for name in self._elastic}
        group_of = {name: group_name(ranks, name) for name, ranks in ranks_of.items()}
        for name, ranks in ranks_of.items():
            if len(ranks) > 1:
                group = group_of[name]
                shown = f"{specs[group].shown}, {name}" if group in specs else name
                specs[group] = GroupSpec(group, ranks.index(generation.rank), len(ranks), shown)
                firsts.setdefault(group, name)
        exchange = generation.sums.check()
        voting = [] if exchange is None else [exchange]
        if generation.data is None:
            groups.connect(generation.prefix, [*specs.values(), *voting])
        else:  # votes and totals alone
            groups.connect(generation.prefix, voting)
            if firsts:
                context = self._context
                timeout = context.collective_timeout
                self._data_store = DataStore(generation, context.host, self._door.connect, timeout)
            for group, name in firsts.items():
                self._connect_data(generation, name, specs[group])
        generation.sums.connected()
        self.page.entered(record.generation)
        for name, gang in self._elastic.items():
            ranks = ranks_of[name]
            place = ranks.index(generation.rank)
            if len(ranks) == 1:
                gang.bind(Binding(place, ranks, None))
                continue
            bound = self._bound(generation, specs[group_of[name]])
            gang.bind(Binding(place, ranks, bound, functools.partial(self._make_group, generation)))
        self._gangs = self._snapshot()
        self._torch_environment.follow(self._gangs, master_host(record))

    def _connect_data(self, generation: Generation, name: str, spec: GroupSpec) -> None:
        assert generation.data is not None
        assert self._data_store is not None
        address = f"{self._data_store.address}/{generation.prefix}/data/{spec.name}"
        generation.data.connect(name, address, self.member, spec, generation.record.generation)

    def _bound(self, generation: Generation, spec: GroupSpec) -> Group:
        """The group of that name, as a gang holds it."""
        from elasticgang.comm.error_swallowing import SwallowingProcessGroup
        from elasticgang.comm.isolated import SharedProcessGroup

        groups, data = generation.groups, generation.data
        pg = SharedProcessGroup(groups, spec) if data is None else data.group(spec.name)
        start = functools.partial((data or groups).start, spec.name)
        return SwallowingProcessGroup(pg, start=start, owner=generation)

    def _make_group(self, generation: Generation, name: str, ranks: Sequence[int]) -> Group:
        """For `ElasticGang.create_gang`."""
        if generation.error is not None:
            raise StepAborted(f"the gang {name} cannot be made: {generation.error}")
        spec = GroupSpec(name, list(ranks).index(generation.rank), len(ranks))
        try:
            if generation.data is None:
                generation.groups.add(generation.prefix, spec)
            else:
                self._connect_data(generation, name, spec)
        except GangError as error:
            generation.fail(error)
            raise
        return self._bound(generation, spec)

    def _on_abort(self, notice: AbortNotice) -> None:
        """On the link's thread, which must not wait: further notices and the next record come by it."""
        self._aborted = notice
        reached("abort_noticed")
        generation = self._generation
        if generation is not None and self._aborted.ends(generation.record.generation):
            generation.groups.kill(PeerLostError(notice.reason), halt=True)  # RENDEZVOUS-3
            reached("abort_begun")

    def data_worker_lost(self, loss: dict[str, Any]) -> None:
        self._link.send("data_worker_lost", loss=loss)

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

        timeout, host = self._context.collective_timeout, self._context.host
        make = process_group if callable(process_group) else lambda: create_process_group(process_group, timeout, host)
        return DataGroups(make, device, timeout, self._end_rank)

    def _make_process(self, client: ForkServerClient, arena: Arena) -> CommProcess:
        with self._door.connect() as agent:
            return CommProcess(
                client,
                arena,
                host=self._context.host,
                timeout=self._context.collective_timeout,
                group=os.getpgid(0),
                name=f"eg-comm-{self._context.local_rank}",
                page=self.page,
                agent=agent,
            )

    def _end_rank(self, stuck: OperationalError) -> None:
        """RULE-3: what cannot be fenced off must not go on beside a new generation."""
        print(f"elasticgang: {self.member} ends itself: {stuck}", file=sys.stderr, flush=True)
        os.killpg(0, signal.SIGKILL)

    def _close_in_child(self) -> None:
        """A forked child (a DataLoader worker) keeps none of the runtime's descriptors open. `rank_main.py` lets go of
        the memory files."""
        from elasticgang.member.rank_context import disinherit

        disinherit()
        generation = self._generation
        descriptors = {self._context.link, self._context.door, *self._comm_launcher.descriptors()}
        if generation is not None:
            descriptors.update(generation.groups.comm.descriptors())
        for descriptor in descriptors:
            with contextlib.suppress(OSError):  # -1, or closed by another thread at this moment
                os.close(descriptor)
