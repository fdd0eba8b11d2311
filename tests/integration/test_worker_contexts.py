"""`DataLoader` with workers that are not forked, and with batches that cannot be sent."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

import elasticgang as eg
from elasticgang.errors import OperationalError
from elasticgang.train import fetch_pool
from tests.exhaustive import exhaustive
from tests.integration.loading import NUM_SAMPLES, Noted, indices, step


class Answers:
    """Each sample is what `sample` returns."""

    def __init__(self, sample: Any) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.sample()


class TooFew:
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitems__(self, index: list[int]) -> list[Tensor]:
        return [torch.tensor(each) for each in index][:1]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(NUM_SAMPLES))


class NeverPickled:
    def __reduce__(self) -> Any:
        raise ArithmeticError("not this one")


# DATAWORKER-5
@pytest.mark.parametrize(
    "context", ["spawn", pytest.param("forkserver", marks=exhaustive), multiprocessing.get_context("forkserver")]
)
def test_workers_may_be_started_in_another_way(
    context: Any, batches: eg.GlobalBatch, loaders: list[eg.DataLoader], tmp_path: Path
) -> None:
    """Such a worker opens what it shares with this process by name, long after it was started; also one that replaces
    another."""
    dataset = Noted(tmp_path)
    loaders.append(loader := eg.DataLoader(dataset, batches, num_workers=1, multiprocessing_context=context))
    assert indices(loader, step(0)) == batches.samples(0).tolist()
    ((_, pid), *_) = dataset.fetched()
    os.kill(pid, signal.SIGKILL)
    found = [each for index in (1, 2) for each in indices(loader, step(index))]
    assert found == [*batches.samples(1).tolist(), *batches.samples(2).tolist()]


def test_a_context_that_does_not_exist_is_refused(batches: eg.GlobalBatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot find context for 'nope'"):
        eg.DataLoader(Noted(tmp_path), batches, num_workers=1, multiprocessing_context="nope")


def test_a_worker_that_cannot_be_started_says_why(batches: eg.GlobalBatch, loaders: list[eg.DataLoader]) -> None:
    dataset = Answers(lambda: 1)  # which does not pickle, so that no worker can be sent it
    loaders.append(loader := eg.DataLoader(dataset, batches, num_workers=1, multiprocessing_context="spawn"))
    with pytest.raises(
        OperationalError, match=r"3 data workers were lost at it; the last one cannot be started \(.*ickl"
    ):
        next(iter(loader.slots(step(0))))


@pytest.mark.parametrize(
    ("sample", "error"),
    [
        (lambda: lambda: 1, r"Can't (get|pickle) local object"),
        (lambda: (each for each in range(2)), "cannot pickle 'generator' object"),
        (lambda: torch.zeros(2, requires_grad=True) * 2, "non-leaf tensor which requires_grad"),
        (NeverPickled, "ArithmeticError: not this one"),
    ],
    ids=["function", "generator", "graph", "reduce"],
)
def test_a_batch_that_cannot_be_sent_is_an_error_of_its_slot(
    sample: Any, error: str, batches: eg.GlobalBatch, loaders: list[eg.DataLoader]
) -> None:
    loaders.append(loader := eg.DataLoader(Answers(sample), batches, num_workers=1, collate_fn=list))
    for index in range(2):
        with pytest.raises(OperationalError, match=rf"slot 0 of step {index} (?s:.*)the batch cannot be sent") as info:
            next(iter(loader.slots(step(index))))
        assert info.match(error)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_that_returns_fewer_samples_is_an_error(
    num_workers: int, batches: eg.GlobalBatch, loaders: list[eg.DataLoader]
) -> None:
    loaders.append(loader := eg.DataLoader(TooFew(), batches, num_workers=num_workers))
    with pytest.raises(OperationalError, match="has returned 1 samples for 2 indices"):
        next(iter(loader.slots(step(0))))


def test_a_stream_is_refused(batches: eg.GlobalBatch) -> None:
    with pytest.raises(ValueError, match=r"streams are for `eg.StreamLoader`"):
        eg.DataLoader(Stream(), batches)


def test_a_feeding_thread_that_fails_ends_the_wait(
    batches: eg.GlobalBatch, loaders: list[eg.DataLoader], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FETCHPOOL-2: whatever fails, the step does not wait for ever."""

    def fail(*args: Any) -> None:
        raise RuntimeError("no memory for another object")

    monkeypatch.setattr(fetch_pool, "Worker", fail)
    loaders.append(loader := eg.DataLoader(Noted(tmp_path), batches, num_workers=1))
    for index in range(2):
        with pytest.raises(OperationalError, match=r"the data loader has failed: RuntimeError\('no memory"):
            indices(loader, step(index))


def test_a_long_wait_for_a_worker_is_told(
    batches: eg.GlobalBatch,
    loaders: list[eg.DataLoader],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(fetch_pool, "SLOW_S", 0.2)
    dataset = Noted(tmp_path)
    dataset.prepare("stop", int(batches.samples(0)[0]))
    loaders.append(loader := eg.DataLoader(dataset, batches, num_workers=1, timeout=3.0))
    with caplog.at_level(logging.WARNING):
        assert indices(loader, step(0)) == batches.samples(0).tolist()
    assert "slot 0 of step 0 has not come from the data workers (" in caplog.text
