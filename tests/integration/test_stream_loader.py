"""`StreamLoader` in a job of one rank, with real streams. `tests/chaos/test_streams.py` has jobs of several ranks."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import elasticgang as eg
from elasticgang.errors import InvalidOperationError, OperationalError, StepAborted
from elasticgang.member.local_rendezvous import LocalRendezvous
from elasticgang.member.manager import QuorumManager
from elasticgang.state.snapshot_server import SnapshotServer
from tests.support import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it

GUARD_S = 60.0
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
        try:
            self._train(num_steps, script)
        finally:
            self.loader.close()
        return self

    def _train(self, num_steps: int, script: Callable[[eg.QuorumManager], None]) -> None:
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


def trained(open_split: Callable[[int], Any], num_steps: int, **options: Any) -> Alone:
    job = Alone(open_split, **options)
    job.register()
    return job.train(num_steps)


WAYS = pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 1}, {"num_workers": 2, "prefetch": 3}, {"num_workers": 3, "prefetch": 0}],
    ids=lambda options: str(options.get("num_workers", 0)),
)


@WAYS
@pytest.mark.parametrize("open_split", [Numbers, loader_of_torchdata])
def test_each_slot_reads_on_in_its_split_and_each_pass_has_each_sample_once(
    open_split: Callable[[int], Any], options: dict[str, int]
) -> None:
    committed = trained(open_split, 10, **options).committed
    assert committed[:4] == [[0, 1, 100, 101], [200, 201, 300, 301], [2, 3, 102, 103], [202, 203, 302, 303]]
    assert committed[4] == [4, 0, 104, 100]  # the end of a pass and the head of the next
    counts = Counter(sample for samples in committed for sample in samples)
    assert counts == dict.fromkeys((100 * split + place for split in range(4) for place in range(LENGTH)), 2)


# STREAM-1, STREAM-4, STREAMREADER-1
@WAYS
@pytest.mark.parametrize("open_split", [Numbers, loader_of_torchdata])
def test_a_dropped_step_is_read_again(open_split: Callable[[int], Any], options: dict[str, int]) -> None:
    tries: Counter[int] = Counter()

    def fail_once(manager: eg.QuorumManager) -> None:
        tries[manager.committed_steps] += 1
        if tries[manager.committed_steps] == 1:
            manager.report_error(ArithmeticError("this step is lost"))

    job = Alone(open_split, **options)
    job.register()
    assert job.train(6, fail_once).committed == trained(open_split, 6).committed
    assert tries == dict.fromkeys(range(6), 2)


# STREAM-1
@WAYS
@pytest.mark.parametrize("open_split", [Numbers, loader_of_torchdata])
def test_another_loader_continues_where_the_state_is(open_split: Callable[[int], Any], options: dict[str, int]) -> None:
    whole, first = trained(open_split, 10), trained(open_split, 4, **options)
    second = Alone(open_split, **options)
    second.loader.load_state_dict(first.loader.state_dict())
    second.register()
    assert second.train(6).committed == whole.committed[4:]


@WAYS
def test_random_numbers_of_a_split_do_not_depend_on_the_script(options: dict[str, int]) -> None:
    class Random(Numbers):
        def __iter__(self) -> Iterator[int]:
            return (number + 1000 * int(torch.randint(1, 99, ())) for number in super().__iter__())

    def reseed(manager: eg.QuorumManager) -> None:
        torch.default_generator.manual_seed(7)

    job = Alone(Random, **options)
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


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_closed_loader_reads_nothing(num_workers: int) -> None:
    job = Alone(Numbers, num_workers=num_workers)
    job.register()
    with pytest.raises(OperationalError, match="the data loader is closed"):
        job.train(3, lambda manager: job.loader.close())
    assert len(job.committed) == 1
    assert job.loader.state_dict()["splits"], "a checkpoint can still be saved"


# STREAM-3
@pytest.mark.parametrize("has_failed", [False, True])
def test_a_step_whose_loop_was_left_early_is_refused_unless_it_has_failed(has_failed: bool) -> None:
    job = Alone(Numbers)
    job.register()

    def leave_early(step: eg.Step) -> None:
        with step:
            for _, batch in job.loader.slots(step):
                with job.model.accumulate(last=True):
                    job.model(batch.float()[:, None]).sum().backward()
                break
            if has_failed:
                job.manager.report_error(ArithmeticError("this step is lost"))
            assert not job.optim.step(weight=1.0)

    if has_failed:
        leave_early(next(job.manager.steps(1)))
    else:
        with pytest.raises(InvalidOperationError, match="slots of step 0 was left early"):
            leave_early(next(job.manager.steps(1)))
    assert job.manager.committed_steps == 0


# STREAM-3
@pytest.mark.parametrize("is_first", [False, True])
def test_a_loop_over_two_loaders_at_once_reads_all_slots(is_first: bool) -> None:
    """`zip` does not ask the second one for its end."""
    job = Alone(Numbers)
    job.register()
    other = eg.DataLoader(list(range(100)), eg.GlobalBatch(100, size=SIZE, slot=SLOT))
    found = []
    for step in job.manager.steps(3):
        with step:
            loaded = [job.loader.slots(step), other.slots(step)]
            samples = []
            for pair in zip(*(loaded if is_first else reversed(loaded)), strict=False):
                (slot, batch), _ = pair if is_first else reversed(pair)
                with job.model.accumulate(last=slot.last):
                    job.model(batch.float()[:, None]).sum().backward()
                samples += batch.tolist()
            assert job.optim.step(weight=loaded[0].num_samples)
            found.append(samples)
    assert found == trained(Numbers, 3).committed


def test_slots_are_iterated_over_once() -> None:
    job = Alone(Numbers)
    job.register()

    def iterate_twice() -> None:
        with next(job.manager.steps(1)) as step:
            slots = job.loader.slots(step)
            assert len(list(slots)) == 2
            list(slots)

    with pytest.raises(InvalidOperationError, match="iterated over once"):
        iterate_twice()


def test_a_step_that_is_lost_reads_no_further_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        raise StepAborted("lost")

    opened: list[int] = []

    def noted(number: int) -> Numbers:
        opened.append(number)
        return Numbers(number)

    job = Alone(noted)
    job.register()
    step = next(job.manager.steps(1))
    slots = job.loader.slots(step)
    monkeypatch.setattr(step, "check", check)
    with pytest.raises(StepAborted):
        slots.load()
    assert opened == []


# STREAM-2
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_splits": 3}, r"`num_splits` must be a multiple of `size // slot` \(2\)"),
        ({"num_splits": 0}, "`num_splits` must be at least 1"),
        ({"size": 5}, r"`size` must be a multiple of `slot` \(2\)"),
        ({"seed": 0.5}, "`seed` must be an integer, but is 0.5"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Alone(Numbers, **options)


def test_a_state_of_another_number_of_splits_is_refused() -> None:
    state = Alone(Numbers, num_splits=8).loader.state_dict()
    with pytest.raises(ValueError, match="`num_splits` must be 8, as in the job that this one continues, but is 4"):
        Alone(Numbers).loader.load_state_dict(state)


# -- with workers


class Noted(Numbers):
    """Notes in `directory` who has opened and who has read what, a line each. Sample N does once what the name of a
    file `kill-N` or `stop-N` says."""

    directory = Path()

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self._note("opened", number)

    def __iter__(self) -> Iterator[int]:
        for sample in super().__iter__():
            for fault, number in (("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)):
                path = self.directory / f"{fault}-{sample}"
                if path.exists():
                    path.unlink()
                    os.kill(os.getpid(), number)
            self._note("read", sample)
            yield sample

    def _note(self, what: str, number: int) -> None:
        with (self.directory / what).open("a") as file:
            file.write(json.dumps([number, os.getpid()]) + "\n")


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[list[int]]]:
    """What was noted: pairs of a number and a process."""
    monkeypatch.setattr(Noted, "directory", tmp_path)

    def lines(what: str) -> list[list[int]]:
        path = tmp_path / what
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    return lines


Lines = Callable[[str], list[list[int]]]


def test_a_split_is_not_divided_among_the_workers() -> None:
    """torch's streams take their part of the samples by the number of workers."""

    class Counted(Numbers):
        def __iter__(self) -> Iterator[int]:
            info = get_worker_info()
            assert info is not None
            return (number + 1000 * info.num_workers + info.id for number in super().__iter__())

    assert trained(Counted, 1, num_workers=2).committed == [[1000, 1001, 1100, 1101]]


# PREFETCH-5
def test_each_worker_reads_splits_of_its_own_and_opens_each_once(noted: Lines) -> None:
    trained(Noted, 10, num_workers=2, prefetch=2)
    opened = noted("opened")
    assert sorted(number for number, _ in opened) == list(range(NUM_SPLITS))
    assert sorted(Counter(process for _, process in opened).values()) == [2, 2]
    assert os.getpid() not in {process for _, process in opened}
    readers = {(sample // 100, process) for sample, process in noted("read")}
    assert readers == {(number, process) for number, process in opened}


# PREFETCH-4
@pytest.mark.parametrize("num_splits", [2, 4])  # a split is read in each step, or in every second one
def test_what_is_read_ahead_is_read_once(num_splits: int, noted: Lines) -> None:
    ahead = 3
    job = Alone(Noted, num_splits=num_splits, num_workers=1, prefetch=ahead)
    job.register()

    def wait(manager: eg.QuorumManager) -> None:
        due = (manager.committed_steps + 1 + ahead) * SIZE
        wait_until(lambda: len(noted("read")) >= due, "the slots ahead", GUARD_S)
        assert len(noted("read")) == due

    committed = job.train(6, wait).committed
    assert committed == trained(Numbers, 6, num_splits=num_splits).committed
    counts = Counter(sample for sample, _ in noted("read"))
    whole = trained(Numbers, 6 + ahead, num_splits=num_splits).committed
    assert counts == Counter(sample for samples in whole for sample in samples)


# FETCHPOOL-2
@pytest.mark.parametrize("fault", ["kill", "stop"])
@pytest.mark.parametrize("num_splits", [2, 4])
def test_a_worker_that_dies_or_hangs_loses_no_sample(
    fault: str, num_splits: int, noted: Lines, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / f"{fault}-102").touch()
    with caplog.at_level(logging.WARNING):
        job = trained(Noted, 10, num_splits=num_splits, num_workers=2, timeout=GUARD_S if fault == "kill" else 4.0)
    assert not (tmp_path / f"{fault}-102").exists()
    assert job.committed == trained(Numbers, 10, num_splits=num_splits).committed
    (message,) = [record.message for record in caplog.records if "data worker" in record.message]
    said = "has been killed by signal 9" if fault == "kill" else "has not answered for 4 s"
    step = 1 if num_splits == 2 else 2  # in which split 1 is read for the second time
    assert f"{said} at slot 1 of step {step}: replacing it" in message


# FETCHPOOL-3
def test_what_was_read_ahead_from_another_state_is_read_again() -> None:
    job = Alone(Numbers, num_workers=1, prefetch=2)
    job.register()
    other = {"num_splits": NUM_SPLITS, "splits": trained(Numbers, 1).loader.state_dict()["splits"]}
    tries: Counter[int] = Counter()

    def move(manager: eg.QuorumManager) -> None:
        """As a checkpoint of another job does: the same steps follow in other places of the streams."""
        tries[manager.committed_steps] += 1
        if manager.committed_steps == 2 and tries[2] == 1:
            job.loader.load_state_dict(other)

    job.train(4, move)
    assert job.committed[:3] == trained(Numbers, 3).committed
    assert job.committed[3] == [200, 201, 300, 301]


def test_a_split_that_raises_in_a_worker_is_named() -> None:
    class Broken(Numbers):
        def __iter__(self) -> Iterator[int]:
            raise ArithmeticError("this shard is broken")

    with pytest.raises(OperationalError, match=r"slot 0 of step 0 cannot be read from split 0") as raised:
        trained(Broken, 2, num_workers=2)
    assert "this shard is broken" in str(raised.value)
    assert isinstance(raised.value.__cause__, ArithmeticError)


def test_all_batches_are_loaded_at_once_for_a_pipeline() -> None:
    found = []
    job = Alone(Numbers, num_workers=1)
    job.register()
    for step in job.manager.steps(4):
        with step:
            slots = job.loader.slots(step)
            batches = slots.load()
            assert len(batches) == len(slots)
            for slot, batch in zip(slots.slots, batches, strict=True):
                with job.model.accumulate(last=slot.last):
                    job.model(batch.float()[:, None]).sum().backward()
            if job.optim.step(weight=slots.num_samples):
                found.append(torch.cat(batches).tolist())
    job.loader.close()
    assert found == trained(Numbers, 4).committed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": -1}, "`num_workers` must be at least 0"),
        ({"prefetch": -1}, "`prefetch` must be at least 0"),
        ({"timeout": 0.0}, "`timeout` must be greater than 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Alone(Numbers, **options)
