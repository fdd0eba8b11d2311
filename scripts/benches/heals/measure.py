"""The rows of `scripts/bench state` about heals: transfers between two processes, and a job that heals a rank."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from elasticgang.progress import Progress
from scripts.demo_job.driver import JobFailedError

HERE = Path(__file__).parent
CHUNK_SETTINGS = (0, 2, 4, 8)  # of torchft's HTTPTransport; 0: without chunks
_LIMIT_S = 300.0
_POLL_S = 0.02
_SETTLED = 10  # steps of both ranks before a kill, and after the heal


def transfers(mib: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Ours, torchft's with each chunk setting, and plain sockets, in turns."""
    kinds = [("ours", 0), ("sockets", 0), *(("torchft", number) for number in CHUNK_SETTINGS)]
    found: dict[tuple[str, int], list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
    with Progress("heals between two processes", rounds * len(kinds) * mib << 20, sys.stderr, time.monotonic) as shown:
        for _ in range(rounds):
            for kind in kinds:
                found[kind].append(transfer(*kind, mib))
                shown.add(mib << 20)
    seconds = {kind: statistics.median(each[0] for each in measured) for kind, measured in found.items()}
    ours, sockets = seconds["ours", 0], seconds["sockets", 0]
    theirs = {number: seconds["torchft", number] for number in CHUNK_SETTINGS}
    best = min(theirs, key=lambda number: theirs[number])
    common = {"mib": mib, "rounds": rounds, "ours_s": round(ours, 3)}
    yield {
        "figure": "heal_beside_torchft",
        **common,
        "torchft_s": {str(number): round(each, 3) for number, each in theirs.items()},
        "best_chunks": best,
        "ratio": round(theirs[best] / ours, 2),
        "asked": 2,
    }
    yield {
        "figure": "heal_beside_sockets",
        **common,
        "sockets_s": round(sockets, 3),
        "ratio": round(sockets / ours, 2),
        "asked": 0.7,
    }
    source, receiver = (max(each[place] for each in found["ours", 0]) for place in (1, 2))
    torchft = [max(each[place] for each in found["torchft", best]) for place in (1, 2)]
    yield {
        "figure": "heal_extra_memory",
        "mib": mib,
        "source_mib": source,
        "receiver_mib": receiver,
        "torchft_mib": torchft,
        "asked": 128,
    }


def transfer(kind: str, num_chunks: int, mib: int) -> tuple[float, float, float]:
    """Seconds, and the extra memory of the source and of the receiver in MiB."""
    command = [sys.executable, "-m", "scripts.benches.heals.end"]
    rest = [kind, str(mib), str(num_chunks)]
    errors = subprocess.DEVNULL if kind == "torchft" else None  # it logs every request
    with subprocess.Popen(
        [*command, "source", *rest], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
    ) as source:
        assert source.stdin is not None
        assert source.stdout is not None
        try:
            address = source.stdout.readline().strip()
            done = subprocess.run(
                [*command, "receiver", *rest, address],
                stdout=subprocess.PIPE,
                stderr=errors,
                check=True,
                timeout=_LIMIT_S,
            )
            source.stdin.close()
            told = json.loads(source.stdout.readline())
            received = json.loads(done.stdout)
        except BaseException:
            source.kill()
            raise
    return received["s"], told["extra_mib"], received["extra_mib"]


def gaps(mib: int, rounds: int, step_ms: float, directory: Path) -> dict[str, Any]:
    """Kill one of two ranks, again and again."""
    command = [sys.executable, "-m", "elasticgang", "run", "--nproc-per-node", "2"]
    command += [str(HERE / "train.py"), str(directory), str(mib), str(step_ms)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    longest, heals, steps = [], [], []
    with (directory / "job.log").open("wb") as log:
        job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            with Progress("heals of a job's rank", rounds, sys.stderr, time.monotonic) as shown:
                for _ in range(rounds):
                    before = killed_after_settling(directory, job)
                    healed = healed_after(directory, before, job)
                    heals.append(healed["healed_s"])
                    times = [line["at"] for line in lines(directory, 0) if line["at"] <= healed["at"] + 0.5]
                    pairs = list(itertools.pairwise(times))
                    # The kill costs a gap too. The one of the heal is that which the learner's first commit ends.
                    longest.append(max(b - a for a, b in pairs if b >= healed["at"] - healed["healed_s"]))
                    steps.append(statistics.median(b - a for a, b in pairs if b < before))
                    shown.add(1)
        finally:
            end_tree(job)
    gap, step = statistics.median(longest), statistics.median(steps)
    return {
        "figure": "gap_during_heal",
        "mib": mib,
        "rounds": rounds,
        "step_ms": round(step * 1000, 1),
        "gap_ms": round(gap * 1000, 1),
        "heal_ms": round(statistics.median(heals) * 1000, 1),
        "ratio": round(gap / step, 1),
        "asked": 2,
    }


def killed_after_settling(directory: Path, job: subprocess.Popen[bytes]) -> float:
    """When rank 1 was killed."""
    begun = time.monotonic()

    def is_settled() -> bool:
        since = [[line for line in lines(directory, rank) if line["at"] > begun] for rank in (0, 1)]
        return all(len(each) >= _SETTLED for each in since)

    wait_for(is_settled, "settled job", job)
    killed_at = time.monotonic()
    newest = max(directory.glob("1-*.jsonl"), key=lambda path: path.stat().st_mtime)
    psutil.Process(int(newest.stem.partition("-")[2])).kill()
    return killed_at


def healed_after(directory: Path, killed_at: float, job: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The line of the first step that rank 1 commits after that."""

    def found() -> list[dict[str, Any]]:
        return [line for line in lines(directory, 1) if line["at"] > killed_at and line["healed_s"] is not None]

    wait_for(lambda: bool(found()), "heal", job)
    healed = found()[0]
    wait_for(lambda: lines(directory, 0)[-1]["at"] > healed["at"] + 1, "step after the heal", job)
    return healed


def lines(directory: Path, rank: int) -> list[dict[str, Any]]:
    """Of all processes of this rank, in order."""
    texts = [path.read_text() for path in directory.glob(f"{rank}-*.jsonl")]
    found = [json.loads(line) for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return sorted(found, key=lambda line: line["at"])


def wait_for(is_true: Callable[[], bool], what: str, job: subprocess.Popen[bytes] | None = None) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not is_true():
        if time.monotonic() > deadline or (job is not None and job.poll() is not None):
            raise JobFailedError(f"no {what} within {_LIMIT_S:g} s, or the job has ended")
        time.sleep(_POLL_S)


def end_tree(job: subprocess.Popen[bytes]) -> None:
    """Kill a job and all that it has started."""
    family: Sequence[psutil.Process] = psutil.Process(job.pid).children(recursive=True) if job.poll() is None else []
    job.kill()
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    job.wait()
    psutil.wait_procs(family, timeout=30)
