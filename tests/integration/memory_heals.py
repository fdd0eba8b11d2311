"""Heals between this process and others on the host, in small chunks, for tests."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from elasticgang.state import peer_memory, staging, striped_fetch
from tests.integration.memory_holder import CHUNK
from tests.integration.state_ranks import Rank, same
from tests.preloaded import PreloadedProcess
from tests.support import REPOSITORY, environment

SIZE = 20_000  # 3 floats each, thrice with the optimizer's state: about 240 chunks


def record_fetches(monkeypatch: pytest.MonkeyPatch) -> list[striped_fetch.StripedFetch]:
    """Every fetch, of states of any size, in small chunks."""
    made: list[striped_fetch.StripedFetch] = []
    run = striped_fetch.StripedFetch.run

    def seen(fetch: striped_fetch.StripedFetch) -> Any:
        made.append(fetch)
        return run(fetch)

    monkeypatch.setattr(striped_fetch.StripedFetch, "run", seen)
    monkeypatch.setattr(staging, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(striped_fetch, "STRIPE_BYTES", 1)
    monkeypatch.setattr(peer_memory, "MIN_BYTES", 0)
    return made


@contextlib.contextmanager
def process(role: str, *sources: str, seed: int = 2) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.integration.memory_holder", role, str(seed), str(SIZE), *sources]
    pipe = subprocess.PIPE
    with PreloadedProcess(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=REPOSITORY, env=environment()
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def address_of(holder: subprocess.Popen[str]) -> str:
    assert holder.stdout is not None
    return holder.stdout.readline().strip()


def assert_healed(healer: Rank) -> None:
    wanted = Rank(2, None, size=SIZE)
    assert same(healer.large(), wanted.large())
    assert same(healer.optim.state_dict(), wanted.optim.state_dict())
    assert same(healer.small(), wanted.small())


def healer_chunks(rank: Rank) -> int:
    tensors = [*rank.large()[0], *(each for state in rank.large()[1].values() for each in state.values())]
    return sum(-(-tensor.nbytes // CHUNK) for tensor in tensors)
