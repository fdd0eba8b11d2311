"""Process groups of torchft that carry a job's data: their collectives, and how they end."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import torchft.process_group as torchft
from torch._C._distributed_c10d import ErrorType
from torch._C._distributed_c10d import Work as TorchWorkBase

from elasticgang.agent.hang_monitor import read_status
from elasticgang.collectives.collective import Collective
from elasticgang.comm import data_groups
from elasticgang.comm.comm_process import GroupSpec
from elasticgang.comm.data_groups import ABORT_TIMEOUT_S, DataConfiguration, DataGroups
from elasticgang.comm.error_swallowing import SwallowingProcessGroup
from elasticgang.comm.in_process import ProcessGroupGloo
from elasticgang.errors import CollectiveTimeoutError, NotSupportedError, OperationalError, PeerLostError
from elasticgang.gang import ElasticGang, Gang, ReduceOperation
from elasticgang.gang.elastic import Binding
from elasticgang.process.status_page import CommBlock, StatusPage, ThreadState
from elasticgang.protocol.device_errors import device_fault
from elasticgang.protocol.hang_detector import HangDetector, HangReport, Hung
from elasticgang.torch_private import unreported_error
from tests.integration import contract
from tests.integration.fake_cuda import FakeCuda
from tests.integration.test_device_progress import HeldCuda
from tests.preloaded import MARK, PreloadedProcess
from tests.support import REPOSITORY, wait_until

CPU = torch.device("cpu")
GUARD_S = 60.0
_T = TypeVar("_T")
_prefixes = itertools.count()  # of keys in the store of all tests: an object's id may be that of a former one


class Trio:
    """Three ranks, one thread each, with one data group of all of them."""

    def __init__(self, store: str, make: Callable[[], torchft.ProcessGroup]) -> None:
        self._store = store
        self._threads = ThreadPoolExecutor(3)
        self.num_made = 0
        self.stuck: list[OperationalError] = []

        def counted() -> torchft.ProcessGroup:
            self.num_made += 1
            return make()

        self.ranks = [DataGroups(counted, CPU, GUARD_S, self.stuck.append) for _ in range(3)]
        self.present: list[DataConfiguration] = []

    def each(self, function: Callable[[int], _T]) -> list[_T]:
        return [future.result(GUARD_S) for future in [self._threads.submit(function, rank) for rank in range(3)]]

    def configure(self) -> list[ElasticGang]:
        for groups in self.ranks:
            groups.leave()
        prefix = f"{self._store}/trio/{next(_prefixes)}"
        self.present = [groups.open() for groups in self.ranks]

        def connect(rank: int) -> None:
            self.present[rank].connect("dp", f"{prefix}/all", f"rank {rank}", GroupSpec("all", rank, 3), 1)

        self.each(connect)
        return [self._gang(rank, prefix) for rank in range(3)]

    def _gang(self, rank: int, prefix: str) -> ElasticGang:
        present = self.present[rank]

        def bound(name: str) -> SwallowingProcessGroup:
            start = functools.partial(present.start, name)
            return SwallowingProcessGroup(present.group(name), start=start, owner=present)

        def make(name: str, ranks: Sequence[int]) -> SwallowingProcessGroup:
            spec = GroupSpec(name, list(ranks).index(rank), len(ranks))
            present.connect(name, f"{prefix}/{name}", f"rank {rank}", spec, 1)
            return bound(name)

        gang = ElasticGang("dp", CPU)
        gang.bind(Binding(rank, (0, 1, 2), bound("all"), make))
        return gang

    def close(self) -> None:
        for groups in self.ranks:
            groups.close()
        self._threads.shutdown()


KINDS: dict[str, Callable[[], torchft.ProcessGroup]] = {
    "ours": lambda: ProcessGroupGloo(timedelta(seconds=GUARD_S)),
    "torchft's": lambda: torchft.ProcessGroupGloo(timedelta(seconds=GUARD_S)),
}


@pytest.fixture(scope="module", params=KINDS)
def trio(request: pytest.FixtureRequest, store: str) -> Iterator[Trio]:
    trio = Trio(store, KINDS[request.param])
    yield trio
    trio.close()
    assert trio.stuck == []


@pytest.mark.parametrize(
    "check",
    [
        contract.same_on_every_rank,
        contract.one_to_another,
        contract.refusals,
        contract.sub_gangs,
        contract.callbacks_that_wait,
    ],
)
def test_gangs_over_groups_of_torchft_keep_the_contract(trio: Trio, check: Callable[[Gang], None]) -> None:
    gangs = trio.configure()
    trio.each(lambda rank: check(gangs[rank]))
    trio.each(lambda rank: gangs[rank].barrier())


def test_collectives_that_nobody_has_waited_for_are_known_in_their_order(trio: Trio) -> None:
    trio.configure()
    sizes = range(1, 21)

    def start(rank: int, size: int) -> Any:
        tensor = torch.ones(size)
        return trio.present[rank].start("all", Collective("all_reduce", (tensor,), (tensor,)))

    started = trio.each(lambda rank: [start(rank, size) for size in sizes])
    trio.each(lambda rank: started[rank][-1].wait())
    start(0, 99)
    expected = [("all", f"all_reduce of {size} float32 by SUM", size < 20) for size in (*sizes[:-1], 99)]

    def found() -> list[tuple[str, str, bool]]:
        return [(group, str(each), each.has_ended) for group, each in trio.present[0].under_way()]

    wait_until(lambda: found() == expected, f"not {found()}")
    trio.each(lambda rank: trio.present[rank].fail(PeerLostError("a test ends the configuration")))


# DATA-1
def test_a_group_is_made_once_and_configured_in_every_generation(store: str) -> None:
    trio = Trio(store, KINDS["torchft's"])
    for _ in range(3):
        gangs = trio.configure()
        tensors = [torch.ones(2) for _ in gangs]
        trio.each(lambda rank: gangs[rank].all_reduce(tensors[rank], ReduceOperation.SUM))  # noqa: B023
        assert [tensor.tolist() for tensor in tensors] == [[3.0, 3.0]] * 3
    assert trio.num_made == 3
    trio.close()


def test_a_factory_that_makes_no_process_group_of_torchft_is_refused() -> None:
    make: Any = lambda: "gloo"  # noqa: E731
    groups = DataGroups(make, CPU, GUARD_S, lambda stuck: None)
    with pytest.raises(TypeError, match=r"must return a torchft.process_group.ProcessGroup, but returned 'gloo'"):
        groups.open().connect("dp", "127.0.0.1:1/x", "rank 0", GroupSpec("all", 0, 2), 1)


def test_a_collective_that_no_group_of_torchft_has_is_refused_before_anything_is_sent(trio: Trio) -> None:
    gangs = trio.configure()
    for gang in gangs:
        with pytest.raises(NotSupportedError, match="no `monitored_barrier`"):
            gang.start(Collective("monitored_barrier"))
    assert not any(gang.is_poisoned for gang in gangs)
    tensors = [torch.ones(1) for _ in gangs]
    trio.each(lambda rank: gangs[rank].all_reduce(tensors[rank], ReduceOperation.SUM))
    assert [tensor.item() for tensor in tensors] == [3.0] * 3


# DATA-2
def test_a_rank_that_ends_the_configuration_ends_it_for_its_peers_too(trio: Trio) -> None:
    """They wait for it in a collective, and learn of the end by the loss of its connections."""
    gangs = trio.configure()
    tensors = [torch.ones(1 << 20) for _ in gangs]
    works: list[Any] = [gangs[rank].all_reduce(tensors[rank], ReduceOperation.SUM, async_op=True) for rank in (0, 1)]
    trio.present[2].fail(PeerLostError("a test ends it"))
    assert not gangs[2].all_reduce(torch.ones(1), ReduceOperation.SUM, async_op=True).wait()  # type: ignore[union-attr]
    assert [work.wait() for work in works] == [False, False]
    assert all(gang.is_poisoned for gang in gangs)
    for rank in (0, 1):
        assert tensors[rank].eq(0).all()  # a group that was told of it may have written to it
    again = trio.configure()
    trio.each(lambda rank: contract.one_to_another(again[rank]))


def test_a_configure_whose_peers_do_not_come_ends_with_the_configuration(store: str) -> None:
    groups = DataGroups(KINDS["torchft's"], CPU, GUARD_S, lambda stuck: pytest.fail(str(stuck)))
    present = groups.open()
    with ThreadPoolExecutor(1) as threads:
        address = f"{store}/alone/{next(_prefixes)}"
        connecting = threads.submit(present.connect, "dp", address, "rank 0", GroupSpec("all", 0, 2), 1)
        assert not connecting.done()
        present.fail(PeerLostError("the peer is dead"))
        with pytest.raises(PeerLostError, match="the generation ended while the process group of dp was configured"):
            connecting.result(GUARD_S)


@contextlib.contextmanager
def no_further_thread() -> Iterator[None]:
    threading.stack_size(1 << 47)  # more than there is
    try:
        yield
    finally:
        threading.stack_size(0)


# DATA-10
def test_a_group_that_gets_no_thread_costs_the_generation_and_no_more(trio: Trio, store: str) -> None:
    trio.configure()
    groups = DataGroups(KINDS["torchft's"], CPU, GUARD_S, lambda stuck: pytest.fail(str(stuck)))
    with no_further_thread():
        with pytest.raises(PeerLostError, match="could not configure the process group of dp: can't start new thread"):
            groups.open().connect("dp", f"{store}/none/{next(_prefixes)}", "rank 0", GroupSpec("all", 0, 1), 1)
        for present in [groups.present, *trio.present]:
            assert present is not None
            present.fail(PeerLostError("a test ends it"))
            assert present.is_aborted
    again = trio.configure()
    trio.each(lambda rank: contract.one_to_another(again[rank]))


# MANAGER-13
def test_a_configure_that_a_fault_of_the_device_ends_has_it_as_its_cause() -> None:
    class OnBrokenDevice(torchft.ProcessGroupDummy):  # type: ignore[misc]  # of untyped torchft
        def configure(self, *args: Any, **options: Any) -> None:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCompile with")

    groups = DataGroups(lambda: OnBrokenDevice(0, 1), CPU, GUARD_S, lambda stuck: pytest.fail(str(stuck)))
    with pytest.raises(PeerLostError) as raised:
        groups.open().connect("dp", "127.0.0.1:1/x", "rank 0", GroupSpec("all", 0, 2), 1)
    assert device_fault(raised.value) == "CUDA error: an illegal memory access was encountered"


class OnDevice(torchft.ProcessGroupDummy):  # type: ignore[misc]  # of untyped torchft
    """A group on CUDA as far as a configuration asks it. `abort` returns once `gate` lets it."""

    def __init__(self, gate: Callable[[], object] = lambda: None) -> None:
        super().__init__(0, 1)
        self._gate = gate
        self.error: Exception | None = None

    def abort(self, errored: bool = True) -> None:
        self._gate()

    def errored(self) -> Exception | None:
        return self.error


def on_device(
    monkeypatch: pytest.MonkeyPatch,
    groups: Sequence[OnDevice],
    cuda: FakeCuda | None = None,
    block: CommBlock | None = None,
) -> tuple[DataConfiguration, list[Exception]]:
    """A configuration of these groups on cuda:0, and why it has ended the rank."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    made, stuck = iter(groups), list[Exception]()
    cuda = cuda or FakeCuda()
    present = DataGroups(lambda: next(made), torch.device("cuda", 0), GUARD_S, stuck.append, cuda).open(block)
    for name in map(str, range(len(groups))):
        present.connect(name, "127.0.0.1:1/x", "rank 0", GroupSpec(name, 0, 2), 1)
    return present, stuck


# DATA-3
def test_all_groups_are_aborted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As kernels that wait for one another: no abort returns before all have begun."""
    monkeypatch.setattr(data_groups, "DEVICE_ABORT_TIMEOUT_S", GUARD_S)
    all_abort = threading.Barrier(5, timeout=GUARD_S)
    present, stuck = on_device(monkeypatch, [OnDevice(all_abort.wait) for _ in range(5)])
    present.fail(PeerLostError("a peer is dead"))
    assert present.is_aborted
    assert stuck == []


# DATA-3
def test_an_abort_that_does_not_return_ends_a_rank_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A work of NCCL counts as ended once it has an exception, also while its kernel runs."""
    monkeypatch.setattr(data_groups, "DEVICE_ABORT_TIMEOUT_S", 0.2)
    let_go = threading.Event()
    present, stuck = on_device(monkeypatch, [OnDevice(lambda: let_go.wait(GUARD_S)), OnDevice()])
    present.fail(PeerLostError("a peer is dead"))
    let_go.set()
    assert [str(error) for error in stuck] == [
        "a process group that runs in this process could not be aborted within 0.2 s"
    ]


class Nccl(OnDevice):
    """Its abort takes longer than the kernels."""

    abort_outlasts_kernels = True


# DATA-7
def test_a_configuration_ends_when_the_device_has_drained_and_the_aborts_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    drained, let_go = threading.Event(), threading.Event()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: drained.wait(GUARD_S))
    present, stuck = on_device(monkeypatch, [Nccl(lambda: let_go.wait(GUARD_S)) for _ in range(2)])
    with ThreadPoolExecutor(1) as threads:
        ending = threads.submit(present.fail, PeerLostError("a peer is dead"))
        with pytest.raises(FutureTimeoutError):
            ending.result(0.05)
        drained.set()
        ending.result(GUARD_S)
    assert present.is_aborted
    let_go.set()
    assert stuck == []


# DATA-7
def test_the_next_configuration_has_new_groups_and_ends_after_the_aborts_of_the_former(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    let_go, stuck = threading.Event(), list[Exception]()
    made = [Nccl(lambda: let_go.wait(GUARD_S)), Nccl()]
    groups = DataGroups(iter(made).__next__, torch.device("cuda", 0), GUARD_S, stuck.append, FakeCuda())
    for group in made:
        assert groups.open().connect("dp", "127.0.0.1:1/x", "rank 0", GroupSpec("all", 0, 2), 1) is group
        if group is made[0]:
            groups.leave()
    with ThreadPoolExecutor(1) as threads:
        closing = threads.submit(groups.close)
        with pytest.raises(FutureTimeoutError):
            closing.result(0.05)
        let_go.set()
        closing.result(GUARD_S)
    assert stuck == []


# DATA-7
def test_an_abort_that_never_returns_ends_the_rank_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(data_groups, "DEVICE_ABORT_TIMEOUT_S", 2.0)  # this thread may stand still meanwhile
    let_go = threading.Event()
    present, stuck = on_device(monkeypatch, [Nccl(lambda: let_go.wait(GUARD_S))])
    present.fail(PeerLostError("a peer is dead"))
    assert stuck == []
    wait_until(lambda: stuck, "the end of the rank")
    let_go.set()
    assert "could not be aborted within 2 s" in str(stuck[0])


# DATA-7
def test_a_device_that_does_not_drain_ends_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_groups, "DEVICE_ABORT_TIMEOUT_S", 0.2)
    let_go = threading.Event()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: let_go.wait(GUARD_S))
    present, stuck = on_device(monkeypatch, [Nccl(lambda: let_go.wait(GUARD_S))])
    present.fail(PeerLostError("a peer is dead"))
    let_go.set()
    assert "could not be aborted within 0.2 s" in str(stuck[0])


# DATA-5
def test_an_error_that_no_wait_has_raised_is_found_once_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [OnDevice(), OnDevice()]
    present, _ = on_device(monkeypatch, groups)
    gang = SwallowingProcessGroup(groups[1], start=functools.partial(present.start, "1"), owner=present)
    work = gang.start(Collective("all_reduce", (tensor := torch.ones(1),), (tensor,)))
    assert work.wait()
    present.check()
    assert present.error is None
    groups[1].error = RuntimeError("aborted")  # as torch's watchdog, which aborts the communicator then
    assert work.wait()
    gang.check()
    assert isinstance(present.error, PeerLostError)
    assert str(present.error) == "the process group 1: aborted"
    assert gang.is_poisoned


# DATA-8
@pytest.mark.parametrize("is_own", [True, False])
def test_a_collective_that_the_device_does_not_pass_in_its_timeout_ends_the_configuration(
    monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    groups, cuda, aborted = [OnDevice(lambda: aborted.set())], HeldCuda(), threading.Event()
    present, _ = on_device(monkeypatch, groups, cuda)
    gang = SwallowingProcessGroup(groups[0], start=functools.partial(present.start, "0"), owner=present)
    tensor = torch.ones(1)
    work = gang.start(Collective("all_reduce", (tensor,), (tensor,), timeout_s=0.05 if is_own else None))
    assert work.wait(None if is_own else 0.05), "it orders streams, and blocks nobody"
    assert aborted.wait(GUARD_S)
    gang.check()
    assert isinstance(present.error, CollectiveTimeoutError)
    assert str(present.error) == "all_reduce timed out after 0.05 seconds"
    assert gang.is_poisoned


# PASSED-1, HANG-2
def test_a_rank_for_which_others_wait_on_their_devices_is_found_to_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    pages, blocks = [StatusPage() for _ in range(2)], list[CommBlock]()
    for page, cuda, num in zip(pages, (HeldCuda(), FakeCuda()), (2, 1), strict=True):
        block = page.take_block()
        assert block is not None
        blocks.append(block)
        present, _ = on_device(monkeypatch, [OnDevice()], cuda, block)
        block.start()
        page.use(block)
        page.entered(1)
        page.set_thread_state(ThreadState.USER_CODE)
        for _ in range(num):  # rank 1 stops before its second one, which the device of rank 0 waits for
            tensor = torch.ones(1)
            assert present.start("0", Collective("all_reduce", (tensor,), (tensor,))).wait()
        present.check()
    for page in pages:
        for _ in range(5):
            page.step_done()
    detector, found = HangDetector(1000), list[HangReport]()
    for now_ms in range(0, 20_000, detector.interval_ms):
        for page, block in zip(pages, blocks, strict=True):
            page.pulse()
            block.beat()
        readings = [read_status(str(rank), page) for rank, page in enumerate(pages)]
        found += detector.detect(now_ms, readings)
    assert {hung.member for hung in found if isinstance(hung, Hung)} == {"1"}


# DATA-9
def test_what_a_collective_uses_is_kept_for_the_stream_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reduce-scatter makes a tensor of all parts. The callbacks of a future run on another stream than that one's."""

    class Keeping(FakeCuda):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[tuple[int, ...]] = []

        def keep_for_current_stream(self, tensor: torch.Tensor) -> None:
            self.kept.append(tuple(tensor.shape))

    cuda = Keeping()
    present, _ = on_device(monkeypatch, [OnDevice()], cuda)
    parts, own = (torch.ones(3), torch.ones(3)), torch.empty(3)
    future = present.start("0", Collective("reduce_scatter", (own,), parts)).get_future()
    assert future.wait()
    assert set(cuda.kept) == {(6,)}


# DATA-6
def test_the_outputs_of_a_work_live_no_longer_than_its_users_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As works of NCCL, which keep their outputs: those of FSDP would fill the device."""

    class Holding(OnDevice):
        def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
            return Held(tensors)

    class Held(TorchWorkBase):
        def __init__(self, tensors: list[torch.Tensor]) -> None:
            super().__init__()
            self._tensors = tensors

        def wait(self, timeout: timedelta | None = None) -> bool:
            return True

    present, _ = on_device(monkeypatch, [Holding()])
    tensor = torch.ones(1)
    gone = weakref.ref(tensor)
    work = present.start("0", Collective("all_reduce", (tensor,), (tensor,)))
    del tensor
    assert work.wait()
    assert gone() is not None
    del work
    gc.collect()
    assert gone() is None


# DATA-5
@pytest.mark.parametrize("kind", ["COMM_ERROR", "TIMEOUT", "REMOTE_ERROR"])
def test_the_error_of_nccls_backend_is_found_without_a_wait(kind: str) -> None:
    class Backend:
        found = ErrorType.SUCCESS

        def get_error(self) -> ErrorType:
            return self.found

    class Nccl(torchft.ProcessGroupDummy):  # type: ignore[misc]  # of untyped torchft
        """As torchft's group over NCCL: `_pg` is torch's group."""

        def __init__(self) -> None:
            super().__init__(0, 1)
            self._errored: Exception | None = None
            self.backend = Backend()
            self._pg = SimpleNamespace(_get_backend=lambda device: self.backend)

        def errored(self) -> Exception | None:
            pytest.fail("it waits for the current stream")

    group = Nccl()
    assert unreported_error(group) is None
    group.backend.found = getattr(ErrorType, kind)
    assert kind in str(unreported_error(group))
    group._errored = aborted = RuntimeError("aborted")  # as its timeout of a stream does
    assert unreported_error(group) is aborted


@contextlib.contextmanager
def ranks(store: str, size: int) -> Iterator[list[subprocess.Popen[str]]]:
    address = f"{store}/ranks/{time.monotonic_ns()}"
    command = [sys.executable, "-m", "tests.integration.data_ranks", address]
    started: list[subprocess.Popen[str]] = [
        PreloadedProcess(
            [*command, str(rank), str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, MARK: uuid.uuid4().hex},
        )
        for rank in range(size)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def expect(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == f"{line}\n"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGSTOP, -signal.SIGKILL), (signal.SIGKILL, 0)])
def test_a_rank_whose_collective_cannot_be_aborted_within_a_second_is_ended(
    number: signal.Signals, status: int, store: str
) -> None:
    """DATA-3. A stopped peer keeps its connections, and torch's Gloo waits for it; a dead one does not."""
    with ranks(store, 2) as (rank, peer):
        for process in (rank, peer):
            expect(process, "connected")
        peer.send_signal(number)
        tell(rank)
        expect(rank, "started")
        began = time.monotonic()
        tell(rank)
        assert rank.wait(GUARD_S) == status
        assert rank.stderr is not None
        said = rank.stderr.read()
    if status:
        assert "a process group that runs in this process could not be aborted within 1 s" in said
        assert ABORT_TIMEOUT_S <= time.monotonic() - began < GUARD_S / 3
