"""Comm processes that are aborted or killed, that die with their rank, or whose works fail."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

import psutil
import pytest
import torch

from elasticgang.collectives.collective import Collective
from elasticgang.comm.arena import Arena, Block
from elasticgang.comm.comm_process import CommProcess, GroupSpec
from elasticgang.comm.group_set import GroupSet
from elasticgang.comm.staging import Staging
from elasticgang.comm.work import CommWork
from elasticgang.errors import (
    CollectiveTimeoutError,
    ElasticGangError,
    GangError,
    InvalidOperationError,
    PeerLostError,
    StaleGenerationError,
)
from elasticgang.process.forkserver import ForkServer, ForkServerClient
from elasticgang.process.status_page import StatusPage
from tests.integration.comm_calls import AT_ONCE_S, GUARD_S, all_reduce, kill, start_sum, started_comm
from tests.integration.conftest import World, Worlds
from tests.support import wait_dead, wait_until

# -- aborts, deaths and errors


# COMM-3
def test_an_abort_releases_all_waiters_with_its_error(worlds: Worlds) -> None:
    world = worlds(2, timeout=60.0)
    comm = world.comms[0]
    tensors = [torch.full((5,), 7.0) for _ in range(3)]
    works = [start_sum(comm, tensor) for tensor in tensors]
    waiting = [world.begin(lambda work=work: work.wait(GUARD_S)) for work in works]  # type: ignore[misc]
    why = PeerLostError("rank 1 was killed")
    comm.abort(why)
    for work, waiter in zip(works, waiting, strict=True):
        assert waiter.exception(GUARD_S) is why
        with pytest.raises(PeerLostError, match="rank 1 was killed"):
            work.future.wait()
        assert work.done()
        assert work.error is why
    pidfd = os.pidfd_open(comm.pid)
    assert wait_dead([pidfd], GUARD_S) == []  # `abort` does not wait for that
    os.close(pidfd)
    assert all(tensor.tolist() == [7.0] * 5 for tensor in tensors)


# ARENA-2
def test_no_tensor_is_touched_after_an_abort(worlds: Worlds) -> None:
    """COMM-2: even when the peer comes at that very moment."""
    for _ in range(3):
        world = worlds(2)
        tensor = torch.zeros(100_000)
        work = start_sum(world.comms[0], tensor)
        peer = start_sum(world.comms[1], torch.ones(100_000))
        world.comms[0].abort(StaleGenerationError("over"))
        after = tensor.clone()
        assert work.done()
        tensor += 1
        with pytest.raises(GangError) if world.errors[1] else _nothing():
            peer.wait(GUARD_S)
        assert torch.equal(tensor, after + 1)
        assert (after == after[0]).all()


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> bool:
        return isinstance(error[1], GangError)


def test_what_comes_after_an_abort_fails_at_once_and_nothing_is_sent(worlds: Worlds) -> None:
    world = worlds(2)
    comm = world.comms[0]
    comm.abort(PeerLostError("over"))
    tensor = torch.full((5,), 7.0)
    work = start_sum(comm, tensor)
    assert work.done()
    with pytest.raises(StaleGenerationError):
        work.wait(0.0)
    with pytest.raises(StaleGenerationError):
        work.future.wait()
    assert tensor.tolist() == [7.0] * 5
    with pytest.raises(GangError):
        comm.configure("late", [GroupSpec("all", 0, 1)], lambda error: None)
    with pytest.raises(GangError):
        comm.close_groups(1.0)


def test_a_shared_tensor_of_a_call_that_was_never_sent_is_as_it_was(worlds: Worlds) -> None:
    world = worlds(1)
    comm = world.comms[0]
    shared, later = torch.ones(9 << 20), torch.full((9 << 20,), 7.0)
    start_sum(comm, shared).wait(GUARD_S)
    comm.abort(PeerLostError("over"))
    for tensor in (shared.fill_(7.0), later):
        assert start_sum(comm, tensor).done()
        assert bool((tensor == 7.0).all())


# MAPPING-5, ARENA-2
def test_a_bucket_stays_where_it_is_when_its_comm_process_is_killed_and_replaced(worlds: Worlds) -> None:
    world = worlds(2)
    staging = Staging.of(world.arena)
    buckets = [staging.empty(3 << 20, torch.float32) for _ in range(2)]
    places = [bucket.data_ptr() for bucket in buckets]

    def start_sums() -> list[CommWork]:
        return [start_sum(world.comms[rank], bucket.fill_(rank + 1)) for rank, bucket in enumerate(buckets)]

    for victim in range(2):
        for work in start_sums():
            work.wait(GUARD_S)
        assert all(bool((bucket == 3.0).all()) for bucket in buckets)
        works = start_sums()
        kill(world.comms[victim])  # in the middle of it
        for work in works:
            with contextlib.suppress(GangError):
                work.wait(GUARD_S)
        for comm in world.comms:
            comm.close()
        for bucket in buckets:
            bucket.fill_(7.0)
        world.comms = [world.start() for _ in range(2)]
        world.configure()
        assert all(bool((bucket == 7.0).all()) for bucket in buckets)
    for bucket, place in zip(buckets, places, strict=True):
        assert bucket.data_ptr() == place
        staged = staging.stage(bucket, torch.float32)
        assert staged.staged is None, "it is not copied"
        assert staged.shared is not None
        assert staged.shared.edges == ()


def test_all_that_wait_for_one_work_are_released_with_it(worlds: Worlds) -> None:
    """Whoever of them comes or goes meanwhile; one reads, the others wait beside it."""
    world = worlds(2)
    slowest = 0.0
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(300):
            tensors = [torch.ones(10) for _ in range(2)]
            work = start_sum(world.comms[0], tensors[0])
            waiting = [world.begin(lambda work=work: work.wait(GUARD_S)) for _ in range(6)]  # type: ignore[misc]
            if number % 2:
                with contextlib.suppress(CollectiveTimeoutError):
                    work.wait(1e-4)  # comes, and leaves
            start_sum(world.comms[1], tensors[1]).wait(GUARD_S)
            ended = time.monotonic()
            for waiter in waiting:
                waiter.result(GUARD_S)
            slowest = max(slowest, time.monotonic() - ended)
    finally:
        sys.setswitchinterval(switch)
    assert slowest < AT_ONCE_S


def test_an_abort_is_repeatable_from_any_thread_and_after_close(worlds: Worlds) -> None:
    world = worlds(2)
    comm = world.comms[0]
    first, second = PeerLostError("first"), PeerLostError("second")
    work = start_sum(comm, torch.ones(1))
    comm.abort(first)
    world.each(lambda _: comm.abort(second))
    assert work.error is first
    comm.close()
    comm.abort(second)
    comm.close()
    assert comm.ended


def test_aborts_race_with_a_close(worlds: Worlds) -> None:
    """A notice comes while the training thread leaves the generation by itself."""
    world = worlds(0, names=None)
    for _ in range(20):
        comm = world.start()
        aborts = [world.begin(lambda comm=comm: comm.abort(PeerLostError("noticed"))) for _ in range(4)]  # type: ignore[misc]
        comm.close()
        for abort in aborts:
            abort.result(GUARD_S)


def test_the_death_of_a_peer_is_seen_at_once(worlds: Worlds) -> None:
    world = worlds(3, timeout=60.0)
    works = [start_sum(world.comms[rank], torch.ones(100)) for rank in (0, 2)]
    kill(world.comms[1])
    for work in works:
        with pytest.raises(PeerLostError):
            work.wait(AT_ONCE_S)
    wait_until(lambda: world.errors[1], "the error of the rank whose process died", AT_ONCE_S)
    assert len(world.errors[1]) == 1
    with pytest.raises(GangError):
        start_sum(world.comms[0], torch.ones(100)).wait(AT_ONCE_S)


# REPLY-3
def test_the_death_of_the_own_process_fails_its_works_and_is_told_once(worlds: Worlds) -> None:
    world = worlds(2, timeout=60.0)
    works = [start_sum(world.comms[0], torch.ones(100)) for _ in range(5)]
    kill(world.comms[0])
    for work in works:
        with pytest.raises(PeerLostError, match="died"):
            work.wait(AT_ONCE_S)
    assert [str(error) for error in world.errors[0]] == [f"comm process {world.comms[0].pid} died"]
    assert world.comms[0].ended


def test_a_death_without_any_work_is_told_too(worlds: Worlds) -> None:
    world = worlds(2)
    kill(world.comms[0])
    wait_until(lambda: world.errors[0], "the error", AT_ONCE_S)
    with pytest.raises(StaleGenerationError, match=r"all_reduce: .* comm process \d+ died"):
        start_sum(world.comms[0], torch.ones(1)).wait(0.0)
    with pytest.raises(PeerLostError, match=r"comm process \d+ died"):
        world.comms[0].add_group("late", GroupSpec("late", 0, 1))


def test_a_work_that_is_never_matched_ends_by_the_callers_deadline_and_goes_on(worlds: Worlds) -> None:
    world = worlds(2, timeout=60.0)
    tensors = [torch.ones(3), torch.ones(3)]
    work = start_sum(world.comms[0], tensors[0])
    with pytest.raises(CollectiveTimeoutError, match=r"all_reduce timed out after 0.05 seconds"):
        work.wait(0.05)
    assert not work.done()
    start_sum(world.comms[1], tensors[1]).wait(GUARD_S)
    work.wait(GUARD_S)
    assert tensors[0].tolist() == [2.0] * 3


def test_the_groups_own_timeout_fails_the_work(worlds: Worlds) -> None:
    def connected() -> World | None:
        with contextlib.suppress(GangError):  # it is the timeout of the configuration too
            return worlds(2, timeout=0.3)
        return None

    world = wait_until(connected, "a configuration within 0.3 s")
    work = start_sum(world.comms[0], torch.ones(3))
    with pytest.raises(GangError):
        work.wait(GUARD_S)
    assert world.errors[0]


def test_a_work_that_has_failed_is_not_counted_as_completed(worlds: Worlds, forkserver: ForkServer, store: str) -> None:
    """The counts then show in which collective the rank had stopped."""
    world = worlds(2, timeout=60.0, names=None)
    world.comms[0].close()
    fd = StatusPage.create()
    page = StatusPage(fd)
    world.comms[0] = comm = CommProcess(forkserver, world.arena, store=store, host="127.0.0.1", timeout=60.0, page=page)
    comm.wait_ready()
    world.configure()
    block = comm.block
    assert block is not None
    tensor = torch.ones(3)
    with pytest.raises(CollectiveTimeoutError):
        comm.submit("all", Collective("all_reduce", (tensor,), (tensor,), timeout_s=0.1)).wait(GUARD_S)
    assert [(stamps.submitted, stamps.completed) for stamps in block.last_groups()] == [(1, 0)]
    os.close(fd)


@pytest.mark.parametrize("call", ["all_reduce", "send"])
def test_a_call_that_cannot_be_made_fails_as_a_work_does(worlds: Worlds, call: str) -> None:
    world = worlds(1)
    tensor = torch.ones(3)
    work = world.comms[0].submit("no_such_group", Collective(call, (tensor,), (tensor,)))
    with pytest.raises(GangError):
        work.wait(GUARD_S)
    assert len(world.errors[0]) == 1


def test_a_peer_that_does_not_come_ends_configure_by_the_timeout(worlds: Worlds) -> None:
    world = worlds(1, timeout=0.3, names=None)
    with pytest.raises(GangError, match="configure"):
        world.comms[0].configure("alone", [GroupSpec("all", 0, 2)], lambda error: None)


def test_an_abort_releases_configure(worlds: Worlds) -> None:
    world = worlds(1, timeout=60.0, names=None)
    comm = world.comms[0]
    configuring: Future[Any] = world.begin(
        lambda: comm.configure("waits", [GroupSpec("all", 0, 2)], lambda error: None)
    )
    wait_until(lambda: psutil.Process(comm.pid).num_threads() > 2, "the process is at it")
    comm.abort(PeerLostError("rank 1 died before the generation began"))
    assert isinstance(configuring.exception(AT_ONCE_S), PeerLostError)


def test_the_death_of_a_peer_during_configure_is_survived(worlds: Worlds) -> None:
    world = worlds(2, timeout=60.0, names=None)
    kill(world.comms[1])
    one = world.begin(lambda: world.comms[0].configure("half", [GroupSpec("all", 0, 2)], lambda error: None))
    with pytest.raises(GangError):
        world.comms[1].configure("half", [GroupSpec("all", 1, 2)], lambda error: None)
    world.comms[0].abort(PeerLostError("noticed"))
    assert isinstance(one.exception(AT_ONCE_S), GangError)


def test_generations_do_not_meet(worlds: Worlds) -> None:
    """RULE-1: members that do not agree on the prefix cannot connect."""
    world = worlds(2, timeout=0.5, names=None)

    def configure(rank: int) -> None:
        world.comms[rank].configure(f"generation/{rank}", [GroupSpec("all", rank, 2)], lambda error: None)

    for future in world.begin_each(configure):
        assert isinstance(future.exception(GUARD_S), GangError)


def test_groups_are_not_closed_in_order_while_a_work_is_under_way(worlds: Worlds) -> None:
    world = worlds(2)
    start_sum(world.comms[0], torch.ones(3))
    with pytest.raises(GangError, match="1 works are under way"):
        world.comms[0].close_groups(1.0)


# COMM-8
def test_a_work_of_a_configuration_that_was_closed_is_not_sent(worlds: Worlds) -> None:
    comm = worlds(1).comms[0]
    errors: list[GangError] = []
    specs = [GroupSpec("all", 0, 1)]

    def refused(former: int) -> None:
        tensor = torch.ones(3)
        work = comm.submit("all", Collective("all_reduce", (tensor,), (tensor,)), number=former)
        with pytest.raises(StaleGenerationError, match="configured anew"):
            work.wait(GUARD_S)

    former = comm.configure("former", specs, errors.append)
    comm.close_groups(GUARD_S)
    refused(former)
    present = comm.configure("present", specs, errors.append)
    refused(former)
    tensor = torch.ones(3)
    comm.submit("all", Collective("all_reduce", (tensor,), (tensor,)), number=present).wait(GUARD_S)
    assert not errors


# GROUPS-5
def test_a_configuration_that_was_left_starts_nothing_in_the_process_that_it_had(
    forkserver: ForkServer, store: str
) -> None:
    groups = GroupSet(lambda: started_comm(forkserver, store, 30.0))
    tensor = torch.ones(3)
    collective = Collective("all_reduce", (tensor,), (tensor,))
    former = groups.open(GUARD_S)
    former.connect("left/former", [GroupSpec("all", 0, 1)])
    groups.leave()
    present = groups.open(GUARD_S)
    assert present.comm is former.comm
    present.connect("left/present", [GroupSpec("all", 0, 1)])
    with pytest.raises(StaleGenerationError):
        former.start("all", collective).wait()
    assert present.start("all", collective).wait()
    assert present.error is None
    groups.close()


def test_a_process_that_dies_while_it_starts_is_noticed(forkserver: ForkServer, store: str) -> None:
    comm = CommProcess(forkserver, Arena(), store=store, host="127.0.0.1", timeout=5.0, group=0)
    kill(comm)
    wait_until(lambda: comm.ended, "its death to be noticed")
    with pytest.raises(PeerLostError):  # also when it had been ready before
        comm.wait_ready(GUARD_S)
    comm.close()


def test_a_store_that_is_away_is_noticed(forkserver: ForkServer) -> None:
    comm = CommProcess(forkserver, Arena(), store="127.0.0.1:1", host="127.0.0.1", timeout=0.5, group=0)
    comm.wait_ready(GUARD_S)  # the store may come back before it is needed
    with pytest.raises(GangError):
        comm.configure("p", [GroupSpec("g", 0, 2)], lambda error: None)
    comm.close()


def test_a_stopped_process_is_aborted_all_the_same(worlds: Worlds) -> None:
    world = worlds(2)
    os.kill(world.comms[0].pid, signal.SIGSTOP)
    work = start_sum(world.comms[0], torch.ones(3))
    world.comms[0].abort(PeerLostError("it does not answer"))
    with pytest.raises(PeerLostError, match="it does not answer"):
        work.wait(0.0)


def test_a_sender_that_is_blocked_is_released_by_an_abort(worlds: Worlds) -> None:
    """The process reads nothing any more, and its socket is full."""
    world = worlds(1)
    comm = world.comms[0]
    os.kill(comm.pid, signal.SIGSTOP)
    stopped = threading.Event()

    def flood() -> ElasticGangError | None:
        while True:
            work = start_sum(comm, torch.ones(1))
            stopped.set()
            if work.done():
                return work.error

    flooding = world.begin(flood)
    assert stopped.wait(GUARD_S)
    sent = 0
    while sent != (sent := comm.num_works):  # until the sender stands
        time.sleep(0.05)
    comm.abort(PeerLostError("over"))
    assert isinstance(flooding.result(GUARD_S), GangError)


def test_works_that_block_hold_up_no_other(worlds: Worlds) -> None:
    """Gloo's reduce-scatters occupy a thread each of the process while they wait for the peer."""
    world = worlds(2, timeout=20.0)
    outputs, inputs = torch.ones(1), torch.ones(2)
    for _ in range(40):
        world.comms[0].submit("all", Collective("reduce_scatter_single", (outputs,), (inputs,)))
    groups = world.begin_each(
        lambda rank: world.comms[rank].add_group(world.prefix, GroupSpec("more", rank, 2), timeout=GUARD_S)
    )
    for each in groups:
        each.result(GUARD_S)
    tensors = [torch.ones(3), torch.ones(3)]
    all_reduce(world, tensors, group="more")
    assert tensors[0].tolist() == [2.0] * 3


def test_a_group_whose_peer_does_not_come_tells_of_its_timeout_in_the_words_of_the_caller(worlds: Worlds) -> None:
    """torch has a text of its own for each place where it may wait."""
    world = worlds(2)
    with pytest.raises(CollectiveTimeoutError, match=r"^configure timed out after 0\.3 seconds: .*[Tt]ime"):
        world.comms[0].add_group(world.prefix, GroupSpec("more", 0, 2), timeout=0.3)


# -- with its rank


def test_it_dies_with_its_rank_whoever_holds_the_descriptors(forkserver: ForkServer, store: str) -> None:
    """WORKER-1: a child of the rank is busy and holds the other end of every socket."""
    reader, writer = os.pipe()
    forks = forkserver.connect()
    spawned = forkserver.spawn("tests.integration.ranks:rank", {"store": store}, fds=[writer, forks.fileno()])
    forks.close()
    os.close(writer)
    with os.fdopen(reader) as told:
        comm, busy = json.loads(told.readline())
    pidfd = os.pidfd_open(comm)
    assert os.getpgid(comm) == spawned.pid
    signal.pidfd_send_signal(spawned.pidfd, signal.SIGKILL)
    assert wait_dead([pidfd], AT_ONCE_S) == []
    os.kill(busy, signal.SIGKILL)
    for descriptor in (pidfd, spawned.pidfd):
        os.close(descriptor)


def test_its_death_is_seen_although_a_child_of_the_rank_holds_its_socket(
    forkserver: ForkServer, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A DataLoader worker that is forked while a comm process is started inherits both ends of the new socket."""
    inherited: list[int] = []
    spawn = ForkServerClient.spawn

    def spawn_while_forking(self: ForkServerClient, *args: Any, fds: Any, **options: Any) -> Any:
        inherited.extend(os.dup(fd) for fd in fds)  # what a fork at this moment would do
        return spawn(self, *args, fds=fds, **options)

    monkeypatch.setattr(ForkServerClient, "spawn", spawn_while_forking)
    comm = CommProcess(forkserver, Arena(), store=store, host="127.0.0.1", timeout=60.0, group=0)
    comm.wait_ready()
    told: list[GangError] = []
    comm.configure("held", [GroupSpec("all", 0, 1)], told.append)
    kill(comm)
    wait_until(lambda: told, "the error", AT_ONCE_S)
    comm.close()
    for fd in inherited:
        os.close(fd)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_for_the_whole_group_do_not_end_it(worlds: Worlds, number: signal.Signals) -> None:
    world = worlds(2)
    for comm in world.comms:
        os.kill(comm.pid, number)
    tensors = [torch.ones(2), torch.ones(2)]
    all_reduce(world, tensors)
    assert tensors[0].tolist() == [2.0, 2.0]


# -- a kill that nobody waits for


def test_a_kill_that_nobody_waits_for_ends_the_works_while_a_callback_runs(worlds: Worlds) -> None:
    world = worlds()
    comm, error = world.comms[0], PeerLostError("told by the agent")
    is_held, let_go = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        is_held.set()
        assert let_go.wait(GUARD_S)

    future = start_sum(comm, torch.ones(3)).future.then(hold)
    start_sum(world.comms[1], torch.ones(3)).wait(GUARD_S)
    assert is_held.wait(GUARD_S)
    waits = start_sum(comm, torch.ones(3))  # the other rank does not come
    comm.kill(error)
    assert start_sum(comm, torch.ones(3)).error is not None
    wait_until(waits.done, "its end", GUARD_S)
    assert waits.error is error
    let_go.set()
    comm.abort(StaleGenerationError("the fence"))  # as before the rank asks: the process is dead when it returns
    future.wait()


NUM_INTERRUPTED = 1000


class _Interrupt(Exception):
    pass


# REPLY-2
def test_a_wait_that_a_signal_interrupts_leaves_nobody_waiting_for_it(worlds: Worlds) -> None:
    """Its place would be kept for a thread that has gone, and a callback that waits would find nobody who reads."""
    world = worlds(2, names=("never", "all"))
    comm = world.comms[0]

    def submit(rank: int, group: str) -> CommWork:
        tensor = torch.ones(1)
        return start_sum(world.comms[rank], tensor, group)

    def interrupt(number: int, frame: object) -> None:
        raise _Interrupt

    never = submit(0, "never")  # rank 1 does not come
    begun = threading.Event()

    def read() -> None:
        begun.set()
        with contextlib.suppress(CollectiveTimeoutError):
            never.wait(2.0)

    def wait_interrupted() -> None:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        never.wait(GUARD_S)

    reader = threading.Thread(target=read)
    former = signal.signal(signal.SIGALRM, interrupt)
    try:
        reader.start()
        begun.wait(GUARD_S)
        with pytest.raises(_Interrupt):
            wait_interrupted()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, former)
    reader.join(GUARD_S)
    first, second = submit(0, "all").future, submit(0, "all").future
    returned = threading.Event()

    def wait_inside(_: object) -> None:
        second.wait()
        returned.set()

    first.add_done_callback(wait_inside)
    for _ in range(2):
        submit(1, "all").wait(GUARD_S)
    assert returned.wait(GUARD_S)
    assert not comm.ended


# REPLY-6
def test_an_exception_of_a_signals_handler_loses_no_reply_at_whatever_moment(worlds: Worlds) -> None:
    world = worlds(1)
    comm, is_armed, num_interrupted = world.comms[0], False, 0
    delays = random.Random(1)

    def interrupt(number: int, frame: object) -> None:
        nonlocal is_armed
        if is_armed:
            is_armed = False
            raise _Interrupt

    former = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # a callback of its collections, as hypothesis adds one, would swallow the exception, with a warning
    try:
        for _ in range(NUM_INTERRUPTED):
            try:
                is_armed = True
                signal.setitimer(signal.ITIMER_REAL, delays.uniform(1e-6, 8e-4))
                start_sum(comm, torch.ones(1000)).wait(GUARD_S)
                is_armed = False  # here, where the exception is still caught
            except _Interrupt:
                num_interrupted += 1
            tensor = torch.full((1000,), 2.0)
            start_sum(comm, tensor).wait(GUARD_S)
            assert bool((tensor == 2).all())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, former)
        gc.enable()
    assert num_interrupted > NUM_INTERRUPTED // 50
    assert not comm.ended


# REPLY-7
@pytest.mark.parametrize("reads", [True, False], ids=["the reader", "beside the reader"])
def test_a_signals_handler_performs_a_collective_while_its_thread_waits(worlds: Worlds, reads: bool) -> None:
    world = worlds(2, names=("never", "all"))
    tensors = [torch.ones(1), torch.ones(1)]
    sums: list[float] = []
    for _ in range(2):  # then the servers do not read any more
        for work in [start_sum(comm, torch.ones(1)) for comm in world.comms]:
            work.wait(GUARD_S)

    def handle(number: int, frame: object) -> None:
        works = [start_sum(comm, tensor) for comm, tensor in zip(world.comms, tensors, strict=True)]
        for work in works:
            work.wait(GUARD_S)
        sums.extend(tensor.item() for tensor in tensors)
        start_sum(world.comms[1], torch.ones(1), "never").wait(GUARD_S)

    awaited = start_sum(world.comms[0], torch.ones(1), "never")
    begun = threading.Event()

    def read() -> None:
        begun.set()
        awaited.wait(GUARD_S)

    reader = threading.Thread(target=read)
    former = signal.signal(signal.SIGALRM, handle)
    try:
        if not reads:
            reader.start()
            begun.wait(GUARD_S)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        awaited.wait(GUARD_S)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, former)
    assert sums == [2.0, 2.0]
    if not reads:
        reader.join(GUARD_S)


# REENTRY-1, REENTRY-2
def test_a_signals_handler_that_interrupts_a_start_is_refused(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    world = worlds(1)
    comm, take = world.comms[0], world.arena.take
    refused: list[type[BaseException]] = []

    def interrupt(num_bytes: int) -> Block:
        """As a handler at this point."""
        for call in (lambda: start_sum(comm, torch.ones(1)), lambda: pending.wait(GUARD_S)):
            with pytest.raises(InvalidOperationError) as caught:
                call()
            refused.append(caught.type)
        return take(num_bytes)

    pending = start_sum(comm, torch.ones(1))
    with monkeypatch.context() as patched:
        patched.setattr(world.arena, "take", interrupt)
        work = start_sum(comm, torch.ones(1))
    assert len(refused) == 2
    work.wait(GUARD_S)
    pending.wait(GUARD_S)
    start_sum(comm, torch.ones(1)).wait(GUARD_S)
