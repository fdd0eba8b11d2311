"""A job of torchft's own: its lighthouse, and ranks that are restarted when they are killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

os.environ["RUST_LOG"] = "error"  # read once, as torchft is imported; the ranks inherit it

from torchft.coordination import LighthouseServer

_RANK = Path(__file__).with_name("rank.py")
_POLL_S = 0.005
_LIMIT_S = 120.0

Line: TypeAlias = "dict[str, Any]"


class PeerFailedError(Exception):
    """torchft's job did not go on. The message says where its output is."""


@dataclass(frozen=True)
class PeerSettings:
    """`heartbeat_ms`, `join_ms`: timeouts of the lighthouse. `timeout_s`: of its collectives."""

    name: str
    ranks: int
    timeout_s: float
    heartbeat_ms: int
    join_ms: int


@dataclass
class _Rank:
    process: subprocess.Popen[bytes]
    output: Path
    offset: int = 0


class PeerJob:
    """Used as `with PeerJob(...) as job:`, which ends all of it on every way out."""

    def __init__(self, settings: PeerSettings, directory: Path) -> None:
        self._settings, self._directory = settings, directory
        self._ranks: list[_Rank] = []
        self._num_started = 0
        self._lines: list[Line] = []

    def __enter__(self) -> PeerJob:
        self._directory.mkdir(parents=True, exist_ok=True)
        settings = self._settings
        self._lighthouse = LighthouseServer(
            bind="127.0.0.1:0",
            min_replicas=1,
            join_timeout_ms=settings.join_ms,
            heartbeat_timeout_ms=settings.heartbeat_ms,
        )
        self._address = f"http://127.0.0.1:{self._lighthouse.address().rpartition(':')[2]}"
        try:
            self._ranks = [self._start() for _ in range(settings.ranks)]
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def kills(self, num_kills: int, seed: int, wait_s: tuple[float, float]) -> Iterator[tuple[float, float, float]]:
        """For each kill at full strength, ms until: the first survivor's next committed step; the last one's; the first
        step that all ranks take part in. Raises PeerFailedError."""
        source = random.Random(f"peer {seed}")
        self._await(self._is_whole)
        for _ in range(num_kills):
            time.sleep(source.uniform(*wait_s))
            self._lines.clear()
            quorum = self._await(self._is_whole)["quorum"]
            victim = self._ranks[source.randrange(self._settings.ranks)]
            killed_at = time.monotonic()
            victim.process.send_signal(signal.SIGKILL)
            victim.process.wait()
            self._ranks.remove(victim)
            survivors = {rank.output.stem for rank in self._ranks}
            self._ranks.append(self._start())
            self._lines.clear()

            def is_later(line: Line, since: float = killed_at, before: int = quorum) -> bool:
                return bool(line["t"] > since and line["quorum"] > before)

            times = [self._await(partial(_is_of, rank, is_later))["t"] for rank in survivors]
            whole = self._await(lambda line, is_later=is_later: is_later(line) and self._is_whole(line))  # type: ignore[misc]
            first, last, at_full = ((t - killed_at) * 1e3 for t in (min(times), max(times), whole["t"]))
            yield first, last, at_full

    def _is_whole(self, line: Line) -> bool:
        return bool(line["participants"] == self._settings.ranks)

    def _start(self) -> _Rank:
        name = f"rank{self._num_started}"
        self._num_started += 1
        output = self._directory / f"{name}.jsonl"
        command = [sys.executable, str(_RANK), "--lighthouse", self._address, "--name", name]
        command += ["--output", str(output), "--timeout", str(self._settings.timeout_s)]
        with (self._directory / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return _Rank(process, output)

    def _await(self, wanted: Callable[[Line], bool]) -> Line:
        """The earliest committed line that is `wanted`, of those read since `_lines` was cleared and those to come."""
        deadline = time.monotonic() + _LIMIT_S
        while time.monotonic() < deadline:
            self._lines.extend(self._read())
            found = [line for line in self._lines if wanted(line)]
            if found:
                return min(found, key=lambda line: float(line["t"]))
            time.sleep(_POLL_S)
        raise PeerFailedError(f"torchft's job did not go on for {_LIMIT_S:g} s; see {self._directory}")

    def _read(self) -> Iterator[Line]:
        for rank in self._ranks:
            if not rank.output.exists():
                continue
            with rank.output.open("rb") as file:
                file.seek(rank.offset)
                data = file.read()
            data = data[: data.rfind(b"\n") + 1]
            rank.offset += len(data)
            yield from ({"rank": rank.output.stem, **json.loads(line)} for line in data.splitlines())

    def _end(self) -> None:
        for rank in self._ranks:
            if rank.process.poll() is None:
                os.kill(rank.process.pid, signal.SIGKILL)
        for rank in self._ranks:
            rank.process.wait()
        self._lighthouse.shutdown()


def _is_of(rank: str, wanted: Callable[[Line], bool], line: Line) -> bool:
    return line["rank"] == rank and wanted(line)


def default_settings(ranks: int, timeout_s: float) -> PeerSettings:
    """As `torchft_lighthouse` has them without arguments; its Python class waits for joiners for 0.1 s only, by which
    the survivors part."""
    return PeerSettings("torchft", ranks, timeout_s, heartbeat_ms=5_000, join_ms=60_000)


def tuned_settings(ranks: int, timeout_s: float) -> PeerSettings:
    return PeerSettings("torchft tuned", ranks, timeout_s, heartbeat_ms=1_000, join_ms=200)
