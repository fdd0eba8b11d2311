"""`DataLoader` in a job of one rank: real workers, killed, stopped, and failing."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing.process
import os
import random
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

import elasticgang as eg
from elasticgang.errors import OperationalError, StepAborted
from elasticgang.member.step import Step
from elasticgang.protocol.member_state import Share
from tests.exhaustive import exhaustive
from tests.integration.loading import FAULTS, NUM_SAMPLES, SIZE, SLOT, Noted, OneStep, indices, lost_after, step
from tests.support import is_alive, run_preloaded, wait_until

GUARD_S = 60.0
# For one slot, by what happens to its worker: a machine that stands still for two seconds ends no other worker.
SLOT_S = {"kill": GUARD_S, "stop": 4.0}

Make = Callable[..., eg.DataLoader]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed worker is waited for, however slowly a busy machine frees its memory."""
    join = multiprocessing.process.BaseProcess.join
    monkeypatch.setattr(
        multiprocessing.process.BaseProcess, "join", lambda process, timeout=None: join(process, GUARD_S)
    )


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


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """As if there were an accelerator: the tensors that are pinned."""
    pinned: list[Tensor] = []

    def pin_memory(tensor: Tensor) -> Tensor:
        pinned.append(tensor)
        return tensor.clone()

    for name, value in (("is_available", True), ("current_device_index", 0), ("set_device_index", None)):
        monkeypatch.setattr(torch.accelerator, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    return pinned


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


def zero_by_numpy(tensor: Tensor) -> None:
    tensor.numpy()[:] = 0


SPOILS: dict[str, Callable[[Tensor], object]] = {
    "torch": Tensor.zero_,
    "numpy": zero_by_numpy,
    "data": lambda tensor: tensor.data.zero_(),
}


# FETCHPOOL-1
@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("way", SPOILS)
def test_a_step_that_is_tried_again_gets_the_batches_as_they_were_fetched(
    way: str, pin_memory: bool, make: Make, dataset: Noted, pins: list[Tensor]
) -> None:
    loader = make(prefetch=0, pin_memory=pin_memory)
    first = []
    for _, batch in loader.slots(step(0)):
        first.append(batch["noise"].clone())
        batch["more"] = 1
        SPOILS[way](batch["noise"])
        assert not batch["noise"].any()
    again = [batch for _, batch in loader.slots(step(0))]
    assert all(torch.equal(batch["noise"], noise) for batch, noise in zip(again, first, strict=True))
    assert not any("more" in batch for batch in again)
    assert len(dataset.fetched()) == SIZE, "no slot is fetched again"
    assert bool(pins) == pin_memory


def whole_and_part(samples: list[dict[str, Any]]) -> tuple[Tensor, Tensor, Tensor]:
    """A tensor, a view of it, and an empty one."""
    whole = torch.stack([sample["noise"] for sample in samples]).requires_grad_()
    return whole, whole.detach().t()[1:], torch.empty(0)


# FETCHPOOL-1
@pytest.mark.parametrize("sharing", ["file_descriptor", "file_system"])
def test_tensors_of_a_batch_that_share_memory_do_so_in_each_copy(sharing: str, make: Make) -> None:
    strategies = cast(Any, torch.multiprocessing)
    former = strategies.get_sharing_strategy()
    strategies.set_sharing_strategy(sharing)
    try:
        loader = make(num_workers=1, prefetch=0, collate_fn=whole_and_part)
        seen = []
        for _ in range(2):
            (_, (whole, part, empty)), *_ = loader.slots(step(0))
            assert whole.requires_grad
            assert torch.equal(part, whole.detach().t()[1:])
            assert empty.shape == (0,)
            seen.append(whole.tolist())
            part.fill_(-1)
            assert whole[0, 1] == -1
            assert not whole.is_shared(), "the script may send it to other processes"
        assert seen[0] == seen[1]
    finally:
        strategies.set_sharing_strategy(former)


def test_a_batch_of_an_unknown_kind_is_fetched_again(make: Make, dataset: Noted) -> None:
    loader = make(prefetch=0, collate_fn=lambda samples: numpy.array([sample["index"] for sample in samples]))
    for _ in range(2):
        found = []
        for _, batch in loader.slots(step(0)):
            found += batch.tolist()
            batch[:] = -1
        assert found == loader.batches.samples(0).tolist()
    assert len(dataset.fetched()) == 2 * SIZE


@pytest.mark.parametrize("prefetch_likely", [False, True])
def test_a_plan_of_the_samples_may_end_with_the_last_step(prefetch_likely: bool, dataset: Noted) -> None:
    plan = torch.randperm(NUM_SAMPLES).view(-1, SIZE)
    batches = eg.GlobalBatch(NUM_SAMPLES, size=SIZE, slot=SLOT, sampler=lambda seed, step: plan[step])
    loader = eg.DataLoader(dataset, batches, num_workers=1, prefetch=2, prefetch_likely=prefetch_likely)
    found = [indices(loader, step(index)) for index in range(len(plan))]
    assert found == plan.tolist()
    with pytest.raises(IndexError):
        loader.slots(step(len(plan)))
    loader.close()


# PREFETCH-3
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_worker_that_dies_or_hangs_is_replaced_and_nothing_is_lost(
    fault: str, make: Make, dataset: Noted, caplog: pytest.LogCaptureFixture
) -> None:
    loader = make(timeout=SLOT_S[fault])
    dataset.prepare(fault, int(loader.batches.samples(1)[3]))
    steps = [OneStep(index, Share(0, 1)) for index in range(3)]
    with caplog.at_level(logging.WARNING):
        found = [each for one in steps for each in indices(loader, cast(Step, one))]
    assert sorted(found) == list(range(NUM_SAMPLES))
    (record,) = [record for record in caplog.records if "data worker" in record.message]
    said = "has been killed by signal 9" if fault == "kill" else "has not answered for 4 s"
    assert f"{said} at slot 1 of step 1: replacing it" in record.message
    (loss,) = wait_until(lambda: [loss for one in steps for loss in one.losses], "the report", GUARD_S)
    assert f"data worker {loss['worker']} (process {loss['pid']}) {said} at slot 1" in record.message
    assert loss["kind"] == ("died" if fault == "kill" else "hung")
    assert (loss["reason"], loss["step"], loss["slot"]) == (said, 1, 1)


def cut_a_message(number: int) -> None:
    """This worker stops within the first batch that it sends, or behind it, if a file says so."""
    info = get_worker_info()
    assert info is not None
    directory = cast(Any, info.dataset).directory
    send = Connection._send_bytes  # type: ignore[attr-defined]

    def cut(connection: Any, data: Any) -> None:
        for path in directory.glob("cut-*"):
            _, part, fault = path.name.split("-")
            path.unlink()
            message = struct.pack("!i", len(data)) + bytes(data)
            os.write(connection.fileno(), message if part == "whole" else message[: len(message) // 2])
            FAULTS[fault]()
            time.sleep(GUARD_S)  # the signal may reach this thread last
        send(connection, data)

    Connection._send_bytes = cut  # type: ignore[attr-defined]


def test_batches_of_workers_are_pinned(make: Make, pins: list[Tensor]) -> None:
    loader = make(num_workers=1, prefetch=0, pin_memory=True)
    assert indices(loader, step(0)) == loader.batches.samples(0).tolist()
    assert len(pins) == 2 * SIZE // SLOT  # two tensors each


# DATAWORKER-4, DATAWORKER-5
@pytest.mark.parametrize("fault", ["half-kill", "half-stop", "whole-stop", "pinned-half-kill"])
@pytest.mark.timeout(60)
def test_a_worker_that_dies_or_hangs_while_it_sends_a_batch_is_replaced(
    fault: str, make: Make, dataset: Noted, pins: list[Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    pin_memory, fault = fault.startswith("pinned"), fault.removeprefix("pinned-")
    loader = make(num_workers=1, timeout=SLOT_S[fault[-4:]], worker_init_fn=cut_a_message, pin_memory=pin_memory)
    (dataset.directory / f"cut-{fault}").touch()
    waiting = OneStep(0, Share(0, 1))
    with lost_after(waiting, GUARD_S), caplog.at_level(logging.WARNING):
        assert indices(loader, cast(Step, waiting)) == loader.batches.samples(0).tolist()
    said = "has been killed by signal 9" if fault.endswith("kill") else "has not answered for 4 s"
    # behind a whole message, the thread that hands over the batch's memory may do so before the signal reaches it
    slot = "[01]" if fault.startswith("whole") else "0"
    assert re.search(f"{said} at slot {slot} of step 0: replacing it", caplog.text), caplog.text


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


# DATAWORKER-5
@pytest.mark.timeout(60)
def test_a_worker_that_dies_with_a_lock_of_torch_is_replaced(make: Make, dataset: Noted) -> None:
    loader = make(num_workers=1)
    dataset.prepare("hold", int(loader.batches.samples(0)[0]))
    assert indices(loader, step(0)) == loader.batches.samples(0).tolist()


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


# FETCHPOOL-2
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


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_step_that_is_lost_loads_no_further_batches(num_workers: int, make: Make, dataset: Noted) -> None:
    loader = make(num_workers=num_workers)
    lost = OneStep(0, Share(0, 1))
    slots = loader.slots(cast(Step, lost))
    lost.is_lost = True
    with pytest.raises(StepAborted):
        slots.load()
    assert num_workers or dataset.fetched() == []


# FETCHPOOL-2
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_closed_loader_loads_nothing(num_workers: int, make: Make, dataset: Noted) -> None:
    loader = make(num_workers=num_workers, prefetch=0)
    slots = iter(loader.slots(step(0)))
    next(slots)
    loader.close()
    num_fetched = len(dataset.fetched())
    with pytest.raises(OperationalError, match="the data loader is closed"):
        next(slots)
    with pytest.raises(OperationalError, match="the data loader is closed"):
        loader.slots(step(1))
    assert len(dataset.fetched()) == num_fetched


@pytest.mark.parametrize("num_workers", [0, 1])
def test_slots_keep_their_loader_open(num_workers: int, dataset: Noted) -> None:
    batches = eg.GlobalBatch(NUM_SAMPLES, size=SIZE, slot=SLOT)
    slots = eg.DataLoader(dataset, batches, num_workers=num_workers).slots(step(0))
    gc.collect()
    assert len(list(slots)) == SIZE // SLOT


def test_a_closed_loader_is_not_waited_for(make: Make) -> None:
    loader = make()
    waiting = OneStep(0, Share(0, 1))
    slots = loader.slots(cast(Step, waiting))
    loader.close()
    with lost_after(waiting, GUARD_S), pytest.raises(OperationalError, match="the data loader is closed"):
        next(iter(slots))


def test_a_learner_gets_nothing(make: Make, dataset: Noted) -> None:
    loader = make()
    assert list(loader.slots(cast(Step, OneStep(0, None)))) == []
    assert dataset.fetched() == []


def note_number(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    cast(Any, info.dataset).directory.joinpath(f"worker-{number}").touch()


def note_seed(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.seed == torch.initial_seed()
    with open(cast(Any, info.dataset).directory / "seeds", "a") as file:
        file.write(f"{info.seed}\n")


# DATAWORKER-7
def test_each_worker_of_each_loader_starts_with_a_seed_of_its_own(make: Make, dataset: Noted) -> None:
    for _ in range(2):
        loader = make(num_workers=2, worker_init_fn=note_seed)
        dataset.prepare("kill", int(loader.batches.samples(0)[0]))
        indices(loader, step(0))
    seeds = (dataset.directory / "seeds").read_text().split()
    assert len(seeds) >= 4
    assert len(set(seeds)) == len(seeds)


class Opened:
    """A dataset that `open_here` opens in each worker."""

    number: tuple[int, int] | None = None

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, int]:
        assert self.number is not None
        info = get_worker_info()
        assert info is not None
        assert cast(Any, info.dataset) is self
        return {"index": index, "id": info.id, "opened": self.number[0], "of": self.number[1]}


def open_here(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    cast(Any, info.dataset).number = number, info.num_workers


@pytest.mark.parametrize("context", ["fork", pytest.param("forkserver", marks=exhaustive)])
def test_a_worker_knows_its_dataset_and_its_number(context: str) -> None:
    batches = eg.GlobalBatch(NUM_SAMPLES, size=SIZE, slot=SLOT)
    options: dict[str, Any] = {"worker_init_fn": open_here, "multiprocessing_context": context}
    loader = eg.DataLoader(Opened(), batches, num_workers=2, **options)
    seen = [batch for index in range(3) for _, batch in loader.slots(step(index))]
    loader.close()
    assert all(torch.equal(batch["id"], batch["opened"]) for batch in seen)
    assert {int(each) for batch in seen for each in batch["of"]} == {2}
    assert {int(each) for batch in seen for each in batch["id"]} <= {0, 1}


@pytest.mark.usefixtures("patient")
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
        ({"num_workers": 1.0}, "`num_workers` must be an integer, but is 1.0"),
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
    for pid in {pid for _, pid in Noted(tmp_path).fetched()}:
        wait_until(lambda pid=pid: not is_alive(pid), "its end", GUARD_S)  # type: ignore[misc]


def shared_memory() -> set[str]:
    """What of torch's this process has open."""
    links = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the directory itself
            links.add(os.readlink(f"/proc/self/fd/{name}"))
    return {link for link in links if "/torch_" in link}


@pytest.mark.usefixtures("patient")
def test_a_closed_loader_keeps_no_pipe_of_a_worker_and_no_batch(
    make: Make, dataset: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes: list[multiprocessing.process.BaseProcess] = []
    start = multiprocessing.process.BaseProcess.start

    def noted(process: multiprocessing.process.BaseProcess) -> None:
        start(process)
        processes.append(process)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", noted)
    loader = make(num_workers=2)
    before = shared_memory()
    dataset.prepare("kill", int(loader.batches.samples(0)[0]))
    indices(loader, step(0))
    wait_until(lambda: len(dataset.fetched()) >= 2 * SIZE, "the slots ahead", GUARD_S)
    loader.close()
    assert shared_memory() <= before
    assert len(processes) >= 2
    for process in processes:
        with pytest.raises(ValueError, match="process object is closed"):
            _ = process.sentinel


class Helped:
    """Each sample is the status of a program that the dataset has started and ended."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> int:
        with subprocess.Popen(["sleep", "1000"]) as program:
            program.terminate()
            try:
                return program.wait(10)
            finally:
                program.kill()


# STOP-ALL
def test_sigterm_ends_the_programs_that_a_dataset_starts_as_ever() -> None:
    batches = eg.GlobalBatch(NUM_SAMPLES, size=SIZE, slot=SLOT)
    with contextlib.closing(eg.DataLoader(Helped(), batches, num_workers=1)) as loader:
        _, batch = next(iter(loader.slots(step(0))))
        assert batch.tolist() == [-signal.SIGTERM] * SLOT


# STOP-ALL
def test_a_worker_outlives_the_signals_that_every_process_of_a_service_gets(make: Make, dataset: Noted) -> None:
    loader = make(num_workers=1)
    slots = iter(loader.slots(step(0)))
    next(slots)
    (worker,) = {pid for _, pid in dataset.fetched()}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(worker, number)
    assert len(list(slots)) == SIZE // SLOT - 1
    assert len(list(loader.slots(step(1)))) == SIZE // SLOT
    assert {pid for _, pid in dataset.fetched()} == {worker}
