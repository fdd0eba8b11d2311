"""`DataLoader` in a job of one rank: real workers, killed, stopped, and failing."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

import elasticgang as eg
from elasticgang.errors import OperationalError, StepAborted
from elasticgang.member.manager import Step
from elasticgang.protocol.member_state import Share
from tests.support import run_preloaded, wait_until

NUM_SAMPLES, SIZE, SLOT = 24, 8, 2
GUARD_S = 60.0


class Noted:
    """Notes who has fetched which sample, a line each. A file `NAME-INDEX` in `directory` says what sample INDEX does
    first: `kill`, `stop` or `raise`, once for each line in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        for fault, apply in FAULTS.items():
            if self._is_due(f"{fault}-{index}"):
                apply()
        with (self.directory / "fetched").open("a") as file:
            file.write(json.dumps([index, os.getpid()]) + "\n")
        noise = [*torch.rand(2).tolist(), random.random(), float(numpy.random.rand())]
        return {"index": index, "noise": torch.tensor(noise, dtype=torch.float64)}

    def _is_due(self, name: str) -> bool:
        for path in sorted(self.directory.glob(f"{name}.*")):
            path.unlink()
            return True
        return False

    def fetched(self) -> list[list[int]]:
        path = self.directory / "fetched"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def prepare(self, fault: str, index: int, times: int = 1) -> None:
        for number in range(times):
            (self.directory / f"{fault}-{index}.{number}").touch()


def fail() -> None:
    raise ArithmeticError("this sample is broken")


FAULTS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": fail,
}


class OneStep:
    """A step, and this rank's share of it. Lost once `error` is set."""

    def __init__(self, index: int, share: Share | None) -> None:
        self.index, self.share = index, share
        self.is_lost = False

    def check(self) -> None:
        if self.is_lost:
            raise StepAborted("lost")

    def divide(self, num_slots: int) -> None:
        """Nobody keeps slots."""

    def end_slot(self) -> None:
        pass

    def contribute(self) -> None: ...


def step(index: int, place: int = 0, count: int = 1) -> Step:
    return cast(Step, OneStep(index, Share(place, count)))


Make = Callable[..., eg.DataLoader]


@pytest.fixture
def dataset(tmp_path: Path) -> Noted:
    return Noted(tmp_path)


@pytest.fixture
def make(dataset: Noted) -> Iterator[Make]:
    made: list[eg.DataLoader] = []

    def make(**options: Any) -> eg.DataLoader:
        batches = eg.GlobalBatch(NUM_SAMPLES, size=SIZE, slot=SLOT, seed=3)
        made.append(eg.DataLoader(dataset, batches, **{"num_workers": 2, **options}))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


def indices(loader: eg.DataLoader, of: Step) -> list[int]:
    """The samples that a step gets, which are those of its slots."""
    found: list[int] = []
    for slot, batch in loader.slots(of):
        assert batch["index"].tolist() == slot.index.tolist()
        found += batch["index"].tolist()
    return found


def test_workers_give_the_same_batches_as_none_also_where_they_are_random(make: Make) -> None:
    def batches(num_workers: int) -> list[Tensor]:
        loader = make(num_workers=num_workers)
        return [batch["noise"] for index in range(4) for _, batch in loader.slots(step(index))]

    alone = batches(0)
    assert len({tuple(noise.flatten().tolist()) for noise in alone}) == len(alone)
    for num_workers in (1, 3):
        assert all(map(torch.equal, batches(num_workers), alone))


# DATAWORKER-1
@pytest.mark.parametrize("num_workers", [0, 2])
def test_loading_draws_nothing_from_the_scripts_generators(num_workers: int, make: Make) -> None:
    def drawn(load: bool) -> list[float]:
        loader = make(num_workers=num_workers)
        random.seed(1)
        numpy.random.seed(1)
        found = []
        for _ in loader.slots(step(0)) if load else loader.batches.slots(step(0)):
            found += [torch.rand(1).item(), random.random(), float(numpy.random.rand())]
        return found

    assert drawn(load=True) == drawn(load=False)


def test_a_pass_has_each_sample_once(make: Make) -> None:
    loader = make()
    found = [each for index in range(3) for each in indices(loader, step(index))]
    assert sorted(found) == list(range(NUM_SAMPLES))


# PREFETCH-1, PREFETCH-2
def test_what_a_change_is_likely_to_need_is_there_before_it(make: Make, dataset: Noted) -> None:
    loader = make(num_workers=1, prefetch=0, prefetch_likely=True)
    own = indices(loader, step(0, 1, 3))
    likely = [int(index) for slot in loader.batches.likely(0, Share(1, 3)) for index in slot.index]
    wait_until(lambda: len(dataset.fetched()) == len(own) + len(likely), "the likely slots", GUARD_S)
    assert [index for index, _ in dataset.fetched()] == [*own, *likely], "what is needed for certain comes first"
    for place in (0, 1):  # another rank has died, and the step is tried again
        assert set(indices(loader, step(0, place, 2))) <= {*own, *likely}
        assert Counter(index for index, _ in dataset.fetched()).most_common(1)[0][1] == 1


# PREFETCH-1, DATALOADER-1
def test_after_a_change_of_the_share_only_what_moved_is_fetched(make: Make, dataset: Noted) -> None:
    loader = make(num_workers=1, prefetch=1)
    half = [int(i) for number in (0, 1) for slot in loader.batches.share(number, Share(0, 2)) for i in slot.index]
    indices(loader, step(0, 0, 2))
    wait_until(lambda: len(dataset.fetched()) == len(half), "the slots ahead", GUARD_S)  # of this step and the next one
    assert Counter(index for index, _ in dataset.fetched()) == Counter(half)
    assert indices(loader, step(1)) == loader.batches.samples(1).tolist()
    wanted = [*half[: SIZE // 2], *loader.batches.samples(1).tolist(), *loader.batches.samples(2).tolist()]
    wait_until(lambda: len(dataset.fetched()) >= len(wanted), "the slots ahead", GUARD_S)
    assert Counter(index for index, _ in dataset.fetched()) == Counter(wanted)


# DATALOADER-2
def test_a_step_that_is_tried_again_gets_the_same_unchanged_batches(make: Make, dataset: Noted) -> None:
    loader = make(prefetch=0)
    first = []
    for number, (_, batch) in enumerate(loader.slots(step(0))):
        first.append(batch["noise"].clone())
        batch["more"] = 1
        if number == 1:
            batch["noise"].zero_()
    assert len(dataset.fetched()) == SIZE
    again = [batch for _, batch in loader.slots(step(0))]
    assert all(torch.equal(batch["noise"], noise) for batch, noise in zip(again, first, strict=True))
    assert not any("more" in batch for batch in again)
    assert len(dataset.fetched()) == SIZE + SLOT, "only the changed slot is fetched again"


def test_a_batch_of_an_unknown_kind_is_fetched_again(make: Make, dataset: Noted) -> None:
    loader = make(prefetch=0, collate_fn=lambda samples: numpy.array([sample["index"] for sample in samples]))
    for _ in range(2):
        found = []
        for _, batch in loader.slots(step(0)):
            found += batch.tolist()
            batch[:] = -1
        assert found == loader.batches.samples(0).tolist()
    assert len(dataset.fetched()) == 2 * SIZE


# PREFETCH-3
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_worker_that_dies_or_hangs_is_replaced_and_nothing_is_lost(
    fault: str, make: Make, dataset: Noted, caplog: pytest.LogCaptureFixture
) -> None:
    loader = make(timeout=1.0)
    dataset.prepare(fault, int(loader.batches.samples(1)[3]))
    with caplog.at_level(logging.WARNING):
        found = [each for index in range(3) for each in indices(loader, step(index))]
    assert sorted(found) == list(range(NUM_SAMPLES))
    (record,) = [record for record in caplog.records if "data worker" in record.message]
    said = "has been killed by signal 9" if fault == "kill" else "has not answered for 1 s"
    assert f"{said} at slot 1 of step 1: replacing it" in record.message


# DATAWORKER-2
def test_a_worker_is_started_only_while_the_step_waits_for_a_batch(
    make: Make, dataset: Noted, caplog: pytest.LogCaptureFixture
) -> None:
    loader = make(num_workers=1)
    dataset.prepare("kill", int(loader.batches.samples(1)[0]))
    with caplog.at_level(logging.WARNING):
        indices(loader, step(0))
        wait_until(
            lambda: "data worker 0" in caplog.text, "the end of the worker", GUARD_S
        )  # it has died while it was fetching ahead
    number = len(dataset.fetched())
    time.sleep(0.3)  # in which a new worker would fetch
    assert len(dataset.fetched()) == number
    assert indices(loader, step(1)) == loader.batches.samples(1).tolist()


# DATAWORKER-3
def test_the_death_of_a_worker_raises_nothing_in_the_script(make: Make, dataset: Noted) -> None:
    before = signal.getsignal(signal.SIGCHLD)
    loader = make()
    dataset.prepare("kill", int(loader.batches.samples(0)[0]))
    indices(loader, step(0))
    assert signal.getsignal(signal.SIGCHLD) == before


def test_a_worker_that_is_killed_while_idle_is_replaced(make: Make, dataset: Noted) -> None:
    loader = make(num_workers=1, prefetch=0)
    indices(loader, step(0))
    ((_, pid), *_) = dataset.fetched()
    os.kill(pid, signal.SIGKILL)
    assert indices(loader, step(1)) == loader.batches.samples(1).tolist()
    assert len({pid for _, pid in dataset.fetched()}) == 2


def test_a_slot_at_which_every_worker_dies_is_named_and_the_others_are_loaded(make: Make, dataset: Noted) -> None:
    loader = make()
    broken = int(loader.batches.samples(0)[2])
    dataset.prepare("kill", broken, times=9)
    slots = iter(loader.slots(step(0)))
    next(slots)
    with pytest.raises(OperationalError, match=r"slot 1 of step 0 (?s:.*)3 data workers were lost at it"):
        next(slots)
    assert indices(loader, step(1)) == loader.batches.samples(1).tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_the_dataset_raises_is_raised_where_its_slot_is_taken(
    num_workers: int, make: Make, dataset: Noted
) -> None:
    loader = make(num_workers=num_workers)
    samples = loader.batches.samples(0).tolist()
    dataset.prepare("raise", samples[2])
    slots = iter(loader.slots(step(0)))
    next(slots)
    with pytest.raises(OperationalError) as info:
        next(slots)
    assert f"slot 1 of step 0 (the samples {samples[2]}, {samples[3]}) cannot be loaded" in str(info.value)
    assert "this sample is broken" in str(info.value)
    assert isinstance(info.value.__cause__, ArithmeticError)
    assert indices(loader, step(1)) == loader.batches.samples(1).tolist()


# DATALOADER-3
def test_a_step_that_is_lost_waits_for_no_batch(make: Make, dataset: Noted) -> None:
    loader = make(num_workers=1, timeout=GUARD_S)
    dataset.prepare("stop", int(loader.batches.samples(0)[0]))
    lost = OneStep(0, Share(0, 1))
    slots = iter(loader.slots(cast(Step, lost)))
    stopped = dataset.directory / "stop"

    def lose() -> None:
        wait_until(lambda: not list(stopped.parent.glob("stop-*")), "the worker's stop", GUARD_S)
        lost.is_lost = True

    thread = threading.Thread(target=lose)
    thread.start()
    with pytest.raises(StepAborted):
        next(slots)
    thread.join()


def test_a_learner_gets_nothing(make: Make, dataset: Noted) -> None:
    loader = make()
    assert list(loader.slots(cast(Step, OneStep(0, None)))) == []
    assert dataset.fetched() == []


def note_number(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    cast(Any, info.dataset).dataset.directory.joinpath(f"worker-{number}").touch()


def test_workers_are_initialised_by_their_number_and_end_with_the_loader(make: Make, dataset: Noted) -> None:
    loader = make(worker_init_fn=note_number)
    for index in range(3):
        indices(loader, step(index))
    pids = {pid for _, pid in dataset.fetched()}
    wait_until(
        lambda: {path.name for path in dataset.directory.glob("worker-*")} == {"worker-0", "worker-1"},
        "both workers",
        GUARD_S,
    )
    loader.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(OperationalError, match="is closed"):
        loader.slots(step(3))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_workers": -1}, "`num_workers` must be at least 0, but is -1"),
        ({"prefetch": -1}, "`prefetch` must be at least 0, but is -1"),
        ({"timeout": 0.0}, "`timeout` must be greater than 0"),
    ],
)
def test_numbers_are_checked(options: dict[str, Any], named: str, make: Make) -> None:
    with pytest.raises(ValueError, match=named):
        make(**options)


def test_a_dataset_of_another_size_is_refused(dataset: Noted) -> None:
    batches = eg.GlobalBatch(NUM_SAMPLES + 1, size=SIZE, slot=SLOT)
    with pytest.raises(ValueError, match="is for 25 samples, but `dataset` has 24"):
        eg.DataLoader(dataset, batches)


def test_an_iterable_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="map-style"):
        eg.DataLoader(iter([1]), eg.GlobalBatch(1, size=1, slot=1))


def test_workers_end_with_a_process_that_never_closed_its_loader(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom tests.integration.test_data_loader import *\n"
        "batches = eg.GlobalBatch(NUM_SAMPLES, size=SIZE, slot=SLOT)\n"
        "loader = eg.DataLoader(Noted(Path(sys.argv[1])), batches, num_workers=2)\n"
        "print(indices(loader, step(0)))\n"
    )
    done = run_preloaded([sys.executable, str(script), str(tmp_path)], timeout=GUARD_S)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for _, pid in Noted(tmp_path).fetched():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
