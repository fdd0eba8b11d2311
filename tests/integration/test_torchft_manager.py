"""Isolated groups in torchft's own `Manager`, with its lighthouse: steps commit; a lost comm process costs a step."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torchft.process_group as torchft
from torch import Tensor, nn
from torch.distributed import AllreduceOptions, ReduceOp
from torchft.coordination import LighthouseServer
from torchft.ddp import DistributedDataParallel
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper

from elasticgang.comm import ManagedProcessGroup
from elasticgang.comm.error_swallowing import SwallowingProcessGroup
from elasticgang.comm.isolated import ProcessGroupIsolatedGloo
from elasticgang.errors import StepAborted
from scripts.benches.comm import open_store

pytestmark = pytest.mark.filterwarnings("ignore")  # torchft's own: they would be errors in the middle of its work

TIMEOUT = timedelta(seconds=20)
GUARD_S = 60.0
STEPS = 4

_building = threading.Lock()  # the seed is the process's
MakeGroup = Callable[[], Any]
Hook = Callable[[int, Manager], None]


@contextlib.contextmanager
def lighthouse_of(min_replicas: int) -> Iterator[str]:
    """It waits for a replica that is late, as long as that one's heart beats: a busy machine leaves nobody out."""
    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=min_replicas,
        join_timeout_ms=int(1000 * GUARD_S),
        quorum_tick_ms=10,
        heartbeat_timeout_ms=3000,
    )
    yield server.address()
    server.shutdown()


@pytest.fixture
def lighthouse() -> Iterator[str]:
    with lighthouse_of(2) as address:
        yield address


class Replica:
    """One replica of one rank, on a thread: trains until `steps` steps are committed, by `at_least` replicas each."""

    steps = STEPS

    def __init__(self, number: int, lighthouse: str, pg: Any, *, at_least: int = 2, is_async: bool = True) -> None:
        self.pg = pg
        self._number, self._at_least = number, at_least
        self._lighthouse, self._is_async = lighthouse, is_async
        self.committed: list[bool] = []
        self.weights: list[Tensor] = []

    def run(self, before_step: Hook = lambda tries, manager: None) -> None:
        with open_store() as store:
            manager = self._manager(int(store.rpartition(":")[2]))
            try:
                self._train(manager, before_step)
            finally:
                manager.shutdown(wait=False)
                self.pg.shutdown()

    def _manager(self, store_port: int) -> Manager:
        with _building:
            torch.manual_seed(42)
            module = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

        def load(state: Any) -> None:
            module.load_state_dict(state["module"])
            optimizer.load_state_dict(state["optimizer"])

        self._module, self._optimizer = module, optimizer
        return Manager(
            pg=self.pg,
            min_replica_size=self._at_least,
            load_state_dict=load,
            state_dict=lambda: {"module": module.state_dict(), "optimizer": optimizer.state_dict()},
            replica_id=f"replica_{self._number}",
            store_addr="127.0.0.1",
            store_port=store_port,
            rank=0,
            world_size=1,
            lighthouse_addr=self._lighthouse,
            hostname="127.0.0.1",
            use_async_quorum=self._is_async,
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
            connect_timeout=TIMEOUT,
        )

    def _reduction(self, manager: Manager) -> Callable[[Any], Any]:
        return lambda gradient: manager.allreduce(gradient)

    def _train(self, manager: Manager, before_step: Hook) -> None:
        # torchft's DDP fails by an assertion when a work's `wait` raises, whatever the group: it wants a swallowing one
        uses_ddp = isinstance(self.pg, SwallowingProcessGroup) and not isinstance(self, Managed)
        ddp = DistributedDataParallel(manager, self._module) if uses_ddp else None
        optimizer = OptimizerWrapper(manager, self._optimizer)
        while manager.current_step() < self.steps:
            optimizer.zero_grad()
            before_step(len(self.committed), manager)
            step = manager.current_step()
            generator = torch.Generator().manual_seed(step * 10 + self._number)
            outputs = (ddp or self._module)(torch.rand(4, 3, generator=generator))
            torch.autograd.backward(outputs.square().sum())
            if ddp is None:
                reduce = self._reduction(manager)
                for work in [reduce(parameter.grad) for parameter in self._module.parameters()]:
                    work.wait()
            optimizer.step()
            self.committed.append(manager.current_step() > step)
        self.weights = [parameter.detach().clone() for parameter in self._module.parameters()]


def run(replicas: list[Replica], hooks: dict[int, Hook] | None = None) -> None:
    with ThreadPoolExecutor(len(replicas)) as threads:
        futures: list[Future[None]] = [
            threads.submit(replica.run, *([hooks[number]] if hooks and number in hooks else []))
            for number, replica in enumerate(replicas)
        ]
        for future in futures:
            future.result(GUARD_S)


@functools.cache
def undisturbed(is_async: bool) -> list[Tensor]:
    """The weights after the same steps over torchft's in-process Gloo."""
    with lighthouse_of(2) as address:
        replicas = [
            Replica(number, address, torchft.ProcessGroupGloo(TIMEOUT), is_async=is_async) for number in range(2)
        ]
        run(replicas)
    assert all(map(torch.equal, replicas[0].weights, replicas[1].weights))
    return replicas[0].weights


GROUPS: dict[str, MakeGroup] = {
    "isolated": lambda: ProcessGroupIsolatedGloo(TIMEOUT),
    "swallowing": lambda: SwallowingProcessGroup(ProcessGroupIsolatedGloo(TIMEOUT)),
}


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("make", list(GROUPS.values()), ids=list(GROUPS))
def test_steps_commit(make: MakeGroup, is_async: bool, lighthouse: str) -> None:
    replicas = [Replica(number, lighthouse, make(), is_async=is_async) for number in range(2)]
    run(replicas)
    for replica in replicas:
        assert replica.committed == [True] * STEPS
        assert all(map(torch.equal, replica.weights, undisturbed(is_async)))


class KillCommProcess:
    """Kills the comm process of `replica` in step 2, once. `pid`: the process that was killed; 0 before."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.pid = 0

    def __call__(self, tries: int, manager: Manager) -> None:
        manager.wait_quorum()
        if manager.current_step() == 2 and not self.pid:
            pg = self._replica.pg
            self.pid = getattr(pg, "parent", pg).comm_process.pid
            os.kill(self.pid, signal.SIGKILL)


@pytest.mark.parametrize("make", list(GROUPS.values()), ids=list(GROUPS))
def test_a_comm_process_that_is_killed_costs_a_step(make: MakeGroup, lighthouse: str) -> None:
    replicas = [Replica(number, lighthouse, make()) for number in range(2)]
    kill = KillCommProcess(replicas[1])
    run(replicas, {1: kill})
    assert kill.pid
    assert False in replicas[1].committed
    for replica in replicas:
        assert all(map(torch.equal, replica.weights, undisturbed(is_async=True)))


# -- a managed group


class Managed(Replica):
    """Reduces over the managed group of `kind`, ours or torchft's, and keeps what it says of itself."""

    def __init__(self, kind: type, *args: Any, in_futures: bool = False) -> None:
        super().__init__(*args)
        self._kind, self._in_futures = kind, in_futures
        self.seen: list[tuple[int, int]] = []
        self.managed: Any = None

    def _reduction(self, manager: Manager) -> Callable[[Any], Any]:
        if self.managed is None:
            self.managed = self._kind(manager)
        self.seen.append((self.managed.size(), self.managed.rank()))

        def reduce(gradient: Any) -> Any:
            options = AllreduceOptions()
            options.reduceOp = ReduceOp.AVG  # type: ignore[assignment]  # torch's annotation is wrong
            work = self.managed.allreduce([gradient], options)
            return work.get_future() if self._in_futures else work

        return reduce


PARENTS: dict[str, MakeGroup] = {**GROUPS, "in-process": lambda: torchft.ProcessGroupGloo(TIMEOUT)}


@pytest.mark.parametrize("in_futures", [False, True], ids=["work", "future"])
@pytest.mark.parametrize("parent", list(PARENTS))
def test_a_managed_group_is_what_torchfts_is(parent: str, in_futures: bool, lighthouse: str) -> None:
    replicas = [
        Managed(ManagedProcessGroup, number, lighthouse, PARENTS[parent](), in_futures=in_futures)
        for number in range(2)
    ]
    run(list(replicas))
    for replica in replicas:
        assert replica.committed == [True] * STEPS
        assert all(map(torch.equal, replica.weights, undisturbed(is_async=True)))
        assert isinstance(replica.managed, ManagedProcessGroup)
        assert replica.managed.getBackendName() == replica.pg.getBackendName()
        assert [size for size, _ in replica.seen] == [2] * STEPS
    assert sorted(replica.seen[-1][1] for replica in replicas) == [0, 1]


def test_torchfts_managed_group_has_the_same_weights_and_sizes(lighthouse: str) -> None:
    replicas = [Managed(torchft.ManagedProcessGroup, number, lighthouse, PARENTS["isolated"]()) for number in range(2)]
    run(list(replicas))
    for replica in replicas:
        assert all(map(torch.equal, replica.weights, undisturbed(is_async=True)))
        assert [size for size, _ in replica.seen] == [2] * STEPS


@pytest.mark.parametrize("make", list(GROUPS.values()), ids=list(GROUPS))
def test_an_error_in_a_managed_group_costs_a_step(make: MakeGroup, lighthouse: str) -> None:
    replicas = [Managed(ManagedProcessGroup, number, lighthouse, make()) for number in range(2)]
    kill = KillCommProcess(replicas[1])
    run(list(replicas), {1: kill})
    assert kill.pid
    assert False in replicas[1].committed
    for replica in replicas:
        assert all(map(torch.equal, replica.weights, undisturbed(is_async=True)))


class Others(Managed):
    """Makes other collectives than all-reduces, too; in step 2, replica 1 has lost its comm process by then."""

    def __init__(self, *args: Any) -> None:
        super().__init__(ManagedProcessGroup, *args)
        self.others: list[Any] = []
        self.errors: list[bool] = []

    def _reduction(self, manager: Manager) -> Callable[[Any], Any]:
        reduce = super()._reduction(manager)
        pg, rank = self.managed, self.managed.rank()
        found: list[Any] = []
        try:
            pg.allgather([outputs := [torch.zeros(2) for _ in range(2)]], [torch.full((2,), rank + 1.0)]).wait()
            found = [output.tolist() for output in outputs]
            pg.broadcast_one(number := torch.tensor([rank + 5]), 1).wait()
            found.append(number.item())
            pg.barrier().wait()
            pg.monitored_barrier(TIMEOUT)
            pg.allreduce([torch.ones(2), torch.ones(1)], ReduceOp.MAX).wait()
        except StepAborted:
            found.append("aborted")
        self.others.append(found)
        self.errors.append(pg.errored() is not None)
        return reduce


def test_other_collectives_of_a_managed_group_swallow_errors_and_report_them(lighthouse: str) -> None:
    replicas = [Others(number, lighthouse, GROUPS["isolated"]()) for number in range(2)]
    kill = KillCommProcess(replicas[1])
    run(list(replicas), {1: kill})
    for replica in replicas:
        assert all(map(torch.equal, replica.weights, undisturbed(is_async=True)))
        for committed, found, failed in zip(replica.committed, replica.others, replica.errors, strict=True):
            assert committed or failed or replica is replicas[0]
            if committed:
                assert found == [[1.0, 1.0], [2.0, 2.0], 6]
                assert not failed
        assert False in replica.committed
    lost = replicas[1].committed.index(False)
    assert replicas[1].others[lost][-1] == "aborted", "a number that only one rank has is no value"
    assert replicas[1].others[lost][0] in ([0.0, 0.0], "aborted")


@pytest.fixture
def lighthouse_of_one() -> Iterator[str]:
    with lighthouse_of(1) as address:
        yield address


def test_a_replica_leaves_and_another_comes(lighthouse_of_one: str) -> None:
    """The one that stays goes on alone; the newcomer takes its state over torchft's own transport."""
    stays, leaves, comes = (
        Replica(number, lighthouse_of_one, ProcessGroupIsolatedGloo(TIMEOUT), at_least=1) for number in range(3)
    )
    stays.steps = leaves.steps = comes.steps = 10**6
    left, alone = threading.Event(), threading.Event()

    class LeftError(Exception):
        """Raised in the middle of a step."""

    def leave(tries: int, manager: Manager) -> None:
        if manager.num_participants() == 2 and manager.current_step() > 1:
            left.set()
            raise LeftError

    def watch(tries: int, manager: Manager) -> None:
        if stays.steps < 10**6:
            return
        if left.is_set() and manager.num_participants() == 1:  # not before the other one came
            alone.set()
        elif alone.is_set() and manager.num_participants() == 2:
            stays.steps = comes.steps = manager.current_step() + 3

    with ThreadPoolExecutor(3) as threads:
        staying = threads.submit(stays.run, watch)
        with pytest.raises(LeftError):
            leaves.run(leave)
        assert alone.wait(GUARD_S)
        coming = threads.submit(comes.run)
        staying.result(GUARD_S)
        coming.result(GUARD_S)
    assert all(map(torch.equal, stays.weights, comes.weights))
    assert stays.steps == comes.steps < 10**6
