"""`StreamLoader` in a job of one rank, with real streams. `tests/chaos/test_streams.py` has jobs of several ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import elasticgang as eg
from elasticgang.errors import InvalidOperationError, NotSupportedError, OperationalError
from elasticgang.member.local_rendezvous import LocalRendezvous
from elasticgang.member.manager import QuorumManager
from elasticgang.state.snapshot_server import SnapshotServer

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it

NUM_SPLITS, SIZE, SLOT, LENGTH = 4, 4, 2, 5  # LENGTH: samples of a split, which `SLOT` does not divide


class Numbers:
    """A split whose samples are numbers of its own."""

    def __init__(self, number: int, length: int = LENGTH) -> None:
        self.number, self.length, self.place = number, length, 0

    def __iter__(self) -> Iterator[int]:
        while self.place < self.length:
            self.place += 1
            yield 100 * self.number + self.place - 1
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "as tensors": (torch.tensor([self.place]), torch.zeros(0))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]
        (place, empty) = state["as tensors"]
        assert place.tolist() == [self.place]
        assert empty.shape == (0,)


class Stream(IterableDataset[int]):
    def __init__(self, number: int) -> None:
        self._numbers = Numbers(number)

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self._numbers.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._numbers.place = state["place"]


def loader_of_torchdata(number: int) -> StatefulDataLoader[int]:
    return StatefulDataLoader(Stream(number), batch_size=None)


class Alone:
    """A job of one rank that trains one parameter, and its loader. `script` runs in a step, after the loop."""

    def __init__(self, open_split: Callable[[int], Any], **options: Any) -> None:
        layout, device = eg.ParallelLayout(), torch.device("cpu")
        self.manager = QuorumManager(LocalRendezvous(layout, device), SnapshotServer(), layout, device)
        self.model = eg.DistributedDataParallel(self.manager, nn.Linear(1, 1))
        self.optim = eg.Optimizer(self.manager, torch.optim.SGD(self.model.parameters(), lr=0.0))
        self.loader = eg.StreamLoader(
            self.manager, open_split, **{"num_splits": NUM_SPLITS, "size": SIZE, "slot": SLOT, **options}
        )
        self.committed: list[list[int]] = []  # the samples of each step

    def register(self) -> None:
        self.manager.register_state(model=self.model, optim=self.optim, stream=self.loader)

    def train(self, num_steps: int, script: Callable[[eg.QuorumManager], None] = lambda manager: None) -> Alone:
        for step in self.manager.steps(num_steps):
            with step:
                slots, samples = self.loader.slots(step), []
                for slot, batch in slots:
                    with self.model.accumulate(last=slot.last):
                        self.model(batch.float()[:, None]).sum().backward()
                    samples += batch.tolist()
                script(self.manager)
                if self.optim.step(weight=slots.num_samples):
                    self.committed.append(samples)
        return self


def trained(open_split: Callable[[int], Any], num_steps: int, **options: Any) -> Alone:
    job = Alone(open_split, **options)
    job.register()
    return job.train(num_steps)


@pytest.mark.parametrize("open_split", [Numbers, loader_of_torchdata])
def test_each_slot_reads_on_in_its_split_and_each_pass_has_each_sample_once(open_split: Callable[[int], Any]) -> None:
    committed = trained(open_split, 10).committed
    assert committed[:4] == [[0, 1, 100, 101], [200, 201, 300, 301], [2, 3, 102, 103], [202, 203, 302, 303]]
    assert committed[4] == [4, 0, 104, 100]  # the end of a pass and the head of the next
    counts = Counter(sample for samples in committed for sample in samples)
    assert counts == dict.fromkeys((100 * split + place for split in range(4) for place in range(LENGTH)), 2)


# STREAM-1, STREAM-4
@pytest.mark.parametrize("open_split", [Numbers, loader_of_torchdata])
def test_a_dropped_step_is_read_again(open_split: Callable[[int], Any]) -> None:
    tries: Counter[int] = Counter()

    def fail_once(manager: eg.QuorumManager) -> None:
        tries[manager.committed_steps] += 1
        if tries[manager.committed_steps] == 1:
            manager.report_error(ArithmeticError("this step is lost"))

    job = Alone(open_split)
    job.register()
    assert job.train(6, fail_once).committed == trained(open_split, 6).committed
    assert tries == dict.fromkeys(range(6), 2)


# STREAM-1
@pytest.mark.parametrize("open_split", [Numbers, loader_of_torchdata])
def test_another_loader_continues_where_the_state_is(open_split: Callable[[int], Any]) -> None:
    whole, first = trained(open_split, 10), trained(open_split, 4)  # whose last read was in the middle of a pass
    second = Alone(open_split)
    second.loader.load_state_dict(first.loader.state_dict())
    second.register()
    assert second.train(6).committed == whole.committed[4:]


def test_random_numbers_of_a_split_do_not_depend_on_the_script() -> None:
    class Random(Numbers):
        def __iter__(self) -> Iterator[int]:
            return (number + 1000 * int(torch.randint(1, 99, ())) for number in super().__iter__())

    def reseed(manager: eg.QuorumManager) -> None:
        torch.default_generator.manual_seed(7)

    job = Alone(Random)
    job.register()
    job.train(4, reseed)
    assert job.committed == trained(Random, 4).committed
    assert job.committed != trained(Random, 4, seed=1).committed


def test_a_split_that_raises_is_named_and_opened_again() -> None:
    opened: list[int] = []

    class Broken(Numbers):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            opened.append(number)

        def __iter__(self) -> Iterator[int]:
            if opened.count(self.number) == 1 and self.number == 3:
                raise ArithmeticError("this shard is broken")
            return super().__iter__()

    job = Alone(Broken)
    job.register()
    with pytest.raises(OperationalError, match=r"slot 1 of step 1 cannot be read from split 3") as raised:
        job.train(2)
    assert "this shard is broken" in str(raised.value)
    assert isinstance(raised.value.__cause__, ArithmeticError)
    assert opened == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("open_split", "message"),
    [
        (lambda number: Numbers(number, length=0), "the split has no samples"),
        (lambda number: StatefulSet(), r"state\['seen'\] is of set"),
    ],
)
def test_a_split_that_cannot_be_used_is_refused(open_split: Callable[[int], Any], message: str) -> None:
    with pytest.raises(OperationalError, match=message):
        trained(open_split, 1)


class StatefulSet(Numbers):
    def __init__(self) -> None:
        super().__init__(0)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": {1, 2}}


def test_a_loader_that_is_not_registered_is_refused() -> None:
    job = Alone(Numbers)
    job.manager.register_state(model=job.model, optim=job.optim)
    with pytest.raises(InvalidOperationError, match="register the loader"):
        job.train(1)


# STREAM-3
def test_a_loop_that_was_left_early_is_refused_in_the_next_step() -> None:
    job = Alone(Numbers)
    job.register()
    steps = job.manager.steps(2)
    with next(steps) as first:
        for _, batch in job.loader.slots(first):
            with job.model.accumulate(last=True):
                job.model(batch.float()[:, None]).sum().backward()
            break
        assert job.optim.step(weight=1.0)
    second = next(steps)
    with pytest.raises(InvalidOperationError, match="slots of step 0 was left early"):
        job.loader.slots(second)


def test_slots_are_iterated_over_once() -> None:
    job = Alone(Numbers)
    job.register()
    slots = job.loader.slots(next(job.manager.steps(1)))
    assert len(list(slots)) == 2
    with pytest.raises(InvalidOperationError, match="iterated over once"):
        list(slots)


# STREAM-2
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_splits": 3}, r"`num_splits` must be a multiple of `size // slot` \(2\)"),
        ({"num_splits": 0}, "`num_splits` must be at least 1"),
        ({"size": 5}, r"`size` must be a multiple of `slot` \(2\)"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Alone(Numbers, **options)


def test_a_state_of_another_number_of_splits_is_refused() -> None:
    state = Alone(Numbers, num_splits=8).loader.state_dict()
    with pytest.raises(ValueError, match="`num_splits` must be 8, as in the job that this one continues, but is 4"):
        Alone(Numbers).loader.load_state_dict(state)


def test_pipelines_are_refused() -> None:
    layout, device = eg.ParallelLayout(pp=2), torch.device("cpu")
    with pytest.raises(NotSupportedError, match="`pp`"):
        eg.StreamLoader(
            QuorumManager(LocalRendezvous(eg.ParallelLayout(), device), SnapshotServer(), layout, device),
            Numbers,
            num_splits=2,
            size=2,
            slot=1,
        )
