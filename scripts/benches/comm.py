"""How quick process groups are configured and reduce: ours, torchft's BabyGloo and in-process Gloo, in one run.

Ranks are real processes. The kinds take turns, so that what else the machine does falls on all of them. Prints one JSON
line per figure: medians in ms (MB for memory), their ratios, and what is to be reached:

  configure_ms     4 ranks: from the first rank's call to the last one's return; after a clean generation, and after an
                   abort (its time included), with a standby that is ready
  six_gangs_ms     4 ranks: six groups in one round, beside one
  all_reduce_ms    2 ranks, 64 MB: on a tensor that lives on, and on a fresh one each time. "copied" is ours without
                   `storage_mapping.py`: what is copied into and out of shared memory, in place of mapped. Then 25 MB,
                   a gradient bucket: allocated in shared memory, as our DDP does; "malloc" is ours on one that malloc
                   allocated, as torch's DDP does, after it has freed the buckets of another order
  latency_us       2 ranks, 16 B
  comm_process_mb  unique set size of a comm process: configured, and after the reductions of 64 MB

A ratio "a/b" is a's median over b's; "to reach" is what is asked of it, "reached" whether it was, "count" of how many
measurements each median is, "load" the machine's load average. Takes about two minutes on two idle cores. On a busy
machine a figure stops at its --budget, and nearly all of them get worse: trust a run whose load stayed below 3.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torchft.process_group as torchft
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed import ReduceOp

from elasticgang.comm import storage_mapping
from elasticgang.comm.comm_process import CommProcess, GroupSpec
from elasticgang.comm.isolated import ProcessGroupIsolatedGloo
from elasticgang.comm.standby_pool import local_launcher

TIMEOUT_S = 60.0
FEWEST_ROUNDS = 2
LARGE = 64 * 1024 * 1024 // 4
BUCKET = 25 * 1024 * 1024 // 4
SMALL = 4
MAPPED_BYTES = storage_mapping.SMALLEST_BYTES
GANGS = ("control", "root", "dp", "rdp", "sdp", "tp")
_prefixes = itertools.count()

KINDS: dict[str, Any] = {
    "ours": lambda: ProcessGroupIsolatedGloo(TIMEOUT_S),
    "copied": lambda: ProcessGroupIsolatedGloo(TIMEOUT_S),
    "malloc": lambda: ProcessGroupIsolatedGloo(TIMEOUT_S),
    "baby": lambda: torchft.ProcessGroupBabyGloo(TIMEOUT_S),
    "gloo": lambda: torchft.ProcessGroupGloo(torchft.timedelta(seconds=TIMEOUT_S)),
}
KINDS_OF = {  # by what becomes of the tensor
    "lives on": ("ours", "copied", "baby", "gloo"),
    "fresh": ("ours", "copied", "baby", "gloo"),
    "bucket": ("ours", "malloc", "copied", "gloo"),
}


class Rank:
    """One rank process: does what the driver asks for, and answers with times of the system's clock."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._groups: dict[str, Any] = {}
        self._comm: CommProcess | None = None
        self._kept: dict[tuple[str, str], Tensor] = {}  # each its own: Baby moves its to torch's shared memory

    def serve(self) -> None:
        for line in sys.stdin:
            name, arguments = json.loads(line)
            print(json.dumps(getattr(self, name)(**arguments)), flush=True)

    def configure(self, kind: str, address: str, after: str) -> list[float]:
        pg = self._groups.setdefault(kind, None) or KINDS[kind]()
        self._groups[kind] = pg
        if kind == "ours":
            pg.wait_standby(TIMEOUT_S)
        if after == "abort" and kind == "ours":
            # What is under way when a step is lost. (A group of torchft's may not be left with such a work.)
            pg.send([torch.ones(1)], (self._rank + 1) % self._size, 0)
        began = time.monotonic()
        if after == "abort":
            pg.abort()
        pg.configure(address, "replica", self._rank, self._size)
        return [began, time.monotonic()]

    def gangs(self, address: str, names: list[str]) -> list[float]:
        if self._comm is None:
            self._comm = local_launcher().start().result(TIMEOUT_S)
        else:
            self._comm.close_groups(TIMEOUT_S)
        store, _, prefix = address.partition("/")
        specs = [GroupSpec(name, self._rank, self._size) for name in names]
        began = time.monotonic()
        self._comm.configure(prefix, specs, lambda error: None, store=store, timeout=TIMEOUT_S)
        return [began, time.monotonic()]

    def _tensor(self, kind: str, tensor: str) -> Tensor:
        key = kind, tensor
        if tensor == "bucket" and key not in self._kept:
            torch.empty(BUCKET)  # freed at once: malloc takes the next one from the heap
            is_ours = kind == "ours"
            self._kept[key] = local_launcher().empty(BUCKET, torch.float32) if is_ours else torch.empty(BUCKET)
        elif key not in self._kept or tensor == "fresh":
            self._kept[key] = torch.empty(LARGE)
        return self._kept[key].fill_(1.0)

    def all_reduce(self, kind: str, tensor: str, count: int) -> list[float]:
        pg, times = self._groups[kind], []
        storage_mapping.SMALLEST_BYTES = sys.maxsize if kind == "copied" else MAPPED_BYTES
        for _ in range(count):
            reduced = self._tensor(kind, tensor)
            pg.allreduce([torch.ones(1)], ReduceOp.SUM).wait()  # all begin together
            began = time.monotonic()
            pg.allreduce([reduced], ReduceOp.SUM).wait()
            times.append(time.monotonic() - began)
            assert reduced[-1].item() == self._size
        return times

    def latency(self, kind: str, count: int) -> list[float]:
        pg, tensor = self._groups[kind], torch.ones(SMALL)
        for _ in range(20):
            pg.allreduce([tensor], ReduceOp.SUM).wait()
        began = time.monotonic()
        for _ in range(count):
            pg.allreduce([tensor], ReduceOp.SUM).wait()
        return [(time.monotonic() - began) / count]

    def memory(self, kind: str) -> list[float]:
        """In MB, of the subprocess."""
        pg = self._groups[kind]
        process = psutil.Process(pg.comm_process.pid if kind == "ours" else pg._p.pid)
        return [process.memory_full_info().uss / 1e6]

    def end(self) -> list[float]:
        for pg in self._groups.values():
            pg.shutdown()
        if self._comm is not None:
            self._comm.close()
        return []


class World:
    """The driver's side of some ranks."""

    def __init__(self, size: int, store: str) -> None:
        self._store = store
        command = [sys.executable, __file__, "--rank"]
        # As torchrun has it; and a look-up for torch's log that the DNS loses must not cost 5 s.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # torchft says much when its processes end
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        self._ranks = [
            subprocess.Popen([*command, str(rank), str(size)], text=True, env=env, **pipes) for rank in range(size)
        ]

    def ask(self, name: str, **arguments: Any) -> list[list[float]]:
        """Of every rank, at the same time."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps([name, arguments]) + "\n")
            rank.stdin.flush()
        answers = []
        for rank in self._ranks:
            assert rank.stdout is not None
            answers.append(json.loads(rank.stdout.readline() or "null"))
        if None in answers:
            self._errors.seek(0)
            raise RuntimeError(f"a rank died during {name}:\n{self._errors.read()}")
        return answers

    def time(self, name: str, **arguments: Any) -> float:
        """From the first begin to the last end, under a prefix of its own."""
        spans = self.ask(name, address=f"{self._store}/bench/{next(_prefixes)}", **arguments)
        return max(end for _, end in spans) - min(begin for begin, _ in spans)

    def slowest(self, name: str, **arguments: Any) -> list[float]:
        """Of each repetition the slowest rank's time."""
        return [max(times) for times in zip(*self.ask(name, **arguments), strict=True)]

    def __enter__(self) -> World:
        return self

    def __exit__(self, *error: object) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()
        self._errors.close()


@dataclass(frozen=True)
class Rounds:
    """How often the kinds take their turns, for one figure."""

    number: int
    budget_s: float

    def __iter__(self) -> Iterator[int]:
        began = time.monotonic()
        for number in range(self.number):
            if number >= FEWEST_ROUNDS and time.monotonic() - began > self.budget_s:
                return
            yield number


def measure(store: str, rounds: Rounds, baby_rounds: int) -> Iterator[dict[str, Any]]:
    with World(4, store) as world:
        for after in ("clean", "abort"):
            yield _configure(world, after, rounds, baby_rounds)
        yield _six_gangs(world, rounds)
        world.ask("end")
    with World(2, store) as world:
        for kind in KINDS:
            world.time("configure", kind=kind, after="clean")
        configured = {kind: max(world.ask("memory", kind=kind))[0] for kind in ("ours", "baby")}
        for tensor in KINDS_OF:
            yield _all_reduce(world, tensor, rounds)
        yield _latency(world, rounds)
        yield _memory(world, configured)
        world.ask("end")


def _configure(world: World, after: str, rounds: Rounds, baby_rounds: int) -> dict[str, Any]:
    kinds = ("ours", "gloo", "baby") if after == "clean" else ("ours", "baby")
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for kind in kinds:
        world.time("configure", kind=kind, after="clean")  # the first one starts processes
    for number in rounds:
        for kind in kinds:
            if kind != "baby" or number < baby_rounds:
                times[kind].append(world.time("configure", kind=kind, after=after))
    found = _medians(times, 1000)
    reach = {"clean": 60, "abort": 40}[after]
    ratios = {"baby/ours": (found["baby"] / found["ours"], ">=", reach)}
    return _figure("configure_ms", times, found, ratios, ranks=4, after=after)


def _six_gangs(world: World, rounds: Rounds) -> dict[str, Any]:
    times: dict[str, list[float]] = {"six": [], "one": []}
    turns = (("six", GANGS), ("one", GANGS[:1]))
    for _, gangs in turns:
        world.time("gangs", names=list(gangs))  # the first one connects
    for _ in rounds:
        for name, gangs in turns:
            times[name].append(world.time("gangs", names=list(gangs)))
    found = _medians(times, 1000)
    return _figure("six_gangs_ms", times, found, {"six/one": (found["six"] / found["one"], "<=", 2)}, ranks=4)


def _all_reduce(world: World, tensor: str, rounds: Rounds) -> dict[str, Any]:
    times: dict[str, list[float]] = {kind: [] for kind in KINDS_OF[tensor]}
    for kind in times:
        world.slowest("all_reduce", kind=kind, tensor=tensor, count=2)
    for _ in rounds:
        for kind in times:
            times[kind] += world.slowest("all_reduce", kind=kind, tensor=tensor, count=2)
    found = _medians(times, 1000)
    ratios = {"ours/gloo": (found["ours"] / found["gloo"], "<=", 1.3 if tensor == "fresh" else 1.05)}
    if tensor == "fresh":
        ratios["baby/ours"] = (found["baby"] / found["ours"], ">=", 1.5)
    else:  # or `storage_mapping.py` is not worth its lines
        ratios["copied/ours"] = (found["copied"] / found["ours"], ">=", 1.05)
    num_bytes = 4 * (BUCKET if tensor == "bucket" else LARGE)
    return _figure("all_reduce_ms", times, found, ratios, ranks=2, tensor=tensor, bytes=num_bytes)


def _latency(world: World, rounds: Rounds) -> dict[str, Any]:
    times: dict[str, list[float]] = {kind: [] for kind in ("ours", "baby", "gloo")}
    for _ in rounds:
        for kind in times:
            times[kind] += world.slowest("latency", kind=kind, count=200)
    found = _medians(times, 1e6)
    ratios = {"ours/gloo": (found["ours"] / found["gloo"], "<=", 1.3)}
    return _figure("latency_us", times, found, ratios, ranks=2, bytes=4 * SMALL)


def _memory(world: World, configured: dict[str, float]) -> dict[str, Any]:
    after = {kind: max(world.ask("memory", kind=kind))[0] for kind in configured}
    found = {
        f"{kind} {when}": value
        for when, of in (("configured", configured), ("after", after))
        for kind, value in of.items()
    }
    return _figure("comm_process_mb", {}, found, {"ours": (max(configured["ours"], after["ours"]), "<=", 60)})


def _medians(times: dict[str, list[float]], scale: float) -> dict[str, float]:
    return {kind: statistics.median(of_kind) * scale for kind, of_kind in times.items()}


def _figure(
    name: str,
    times: dict[str, list[float]],
    found: dict[str, float],
    ratios: Mapping[str, tuple[float, str, float]],
    **of: Any,
) -> dict[str, Any]:
    figure: dict[str, Any] = {"bench": "comm", "figure": name, **of}
    figure |= {kind: round(value, 2) for kind, value in found.items()}
    if times:
        figure["count"] = {kind: len(of_kind) for kind, of_kind in times.items()}
    for ratio, (value, relation, reach) in ratios.items():
        reached = value >= reach if relation == ">=" else value <= reach
        figure[ratio] = round(value, 3)
        figure[f"{ratio} to reach"] = f"{relation} {reach}"
        figure[f"{ratio} reached"] = reached
    return {**figure, "load": round(os.getloadavg()[0], 2)}


@contextlib.contextmanager
def open_store() -> Iterator[str]:
    """The address of a store."""
    listener = socket.create_server(("127.0.0.1", 0))  # of its own socket, torch would look up by DNS who connects
    port = listener.getsockname()[1]
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    yield f"127.0.0.1:{port}"
    del server  # it serves as long as it lives


def parse_args(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench comm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--rounds", type=int, default=20, help="of each figure (default: %(default)s)")
    parser.add_argument(
        "--baby-rounds", type=int, default=3, help="of BabyGloo's configure, at 3 to 4 s each (default: %(default)s)"
    )
    parser.add_argument(
        "--budget", type=float, default=20.0, help="seconds for each figure, after two rounds (default: %(default)s)"
    )
    args = parser.parse_args(arguments)
    if args.rounds < 1 or args.baby_rounds < 1:
        parser.error("rounds must be at least 1")
    if args.budget < 0:
        parser.error("the budget must be at least 0")
    return args


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        Rank(int(sys.argv[2]), int(sys.argv[3])).serve()
        return 0
    args = parse_args(sys.argv[1:])
    try:
        with open_store() as store:
            for figure in measure(store, Rounds(args.rounds, args.budget), args.baby_rounds):
                print(json.dumps(figure), flush=True)
    except RuntimeError as error:
        print(f"scripts/bench comm: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
