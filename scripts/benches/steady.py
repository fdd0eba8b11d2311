"""What an undisturbed job costs: its speed beside plain torch DDP, and what it asks of the coordinator.

Runs the demo's model in turns under `elasticgang run` and, as plain DistributedDataParallel, under torchrun: the same
microbatches, optimizer and clipping. Prints one JSON line per figure:

  steps_per_s        medians over the rounds, and how many times DDP's ours is
  reproducible_reduction
                     how many times the median step with reduction="reproducible" is that with "sum", both ours
  kept_slots         how many times the median step with keep=True is that without, both ours, with "sum"
  watched            how many times its speed a job keeps while its page and metrics are served and read every second,
                     as the median over windows of one run in turn; the processor time of the server, in % of a core
  coordinator_calls  bytes a second that the job sends to its coordinator, with slow steps and with fast ones; what
                     grows with the steps is calls of the steps, the rest heartbeats and watching

With --busy N, only steps_per_s, while N other processes compute, each in a session of its own: how a job keeps its
share of a machine beside others.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from elasticgang.watch.serving import serve
from scripts.demo_job.driver import Job, JobFailedError, JobSpec, Tail
from scripts.figures import print_figures

PLAIN = Path(__file__).with_name("pairs") / "plain_ddp.py"
_FAST = ("--dim", "32", "--layers", "1", "--context", "16")
_WARM_UP = 20
_NEVER = 10**7
_WINDOW_S = 10.0
_WATCH_S = 5.0
_NUM_WINDOWS = 8  # in each round, in turn without the server and with it


def ours(args: argparse.Namespace, directory: Path, *asked: str) -> float:
    """Steps a second. `asked`: options of the script."""
    options = ("--dim", str(args.dim), *asked)
    return rate_of(JobSpec(args.ranks, args.steps, args.seed, directory, options))


def rate_of(spec: JobSpec) -> float:
    """Steps a second."""
    with Job(spec) as job:
        job.follow(lambda: 1.0)
        job.read()
        times = sorted({line.attempt: line.t for line in reversed(job.run_log.committed)}.values())
    return _rate(times)


def plain(args: argparse.Namespace, directory: Path) -> float:
    directory.mkdir()
    output = directory / "steps.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    command += [str(PLAIN), "--steps", str(args.steps), "--seed", str(args.seed), "--dim", str(args.dim)]
    with (directory / "job.log").open("wb") as log:
        done = subprocess.run(
            [*command, "--output", str(output)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    if done.returncode:
        last = (directory / "job.log").read_text(errors="replace").splitlines()[-20:]
        raise JobFailedError("\n".join([f"torchrun ended with {done.returncode}:", *last]))
    return _rate([line["t"] for line in Tail(output).read()])


def _rate(times: list[float]) -> float:
    return (len(times) - 1 - _WARM_UP) / (times[-1] - times[_WARM_UP])


def coordinator_bytes(args: argparse.Namespace, directory: Path, train_args: tuple[str, ...]) -> tuple[float, float]:
    """Steps a second, and bytes a second that the job sends to its coordinator."""
    with Job(JobSpec(args.ranks, _NEVER, args.seed, directory, train_args)) as job:
        window: list[tuple[float, int, int]] = []

        def tick() -> float | None:
            newest = job.run_log.newest
            if newest is None or newest.step < _WARM_UP or (window and time.monotonic() < window[0][0] + _WINDOW_S):
                return 0.05
            window.append((time.monotonic(), newest.step, _sent(directory)))
            return None if len(window) == 2 else 0.05

        job.follow(tick)
    (began, first, before), (ended, last, after) = window
    return (last - first) / (ended - began), (after - before) / (ended - began)


def _sent(directory: Path) -> int:
    """Bytes that all connections to the processes of the coordinator have sent so far."""
    started = next(line for line in Tail(directory / "events.jsonl").read() if line["event"] == "started")
    listening = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
    port = started["coordinator"].rpartition(":")[2]
    owner = next(re.search(r"pid=(\d+)", line) for line in listening.splitlines() if f":{port} " in line)
    assert owner is not None
    own = f"pid={owner[1]},"
    ports = {line.split()[3].rpartition(":")[2] for line in listening.splitlines() if own in line}
    total = 0
    for each in ports:
        told = subprocess.run(["ss", "-Htni", "dport", "=", each], capture_output=True, text=True, check=True).stdout
        total += sum(map(int, re.findall(r"bytes_sent:(\d+)", told)))
    return total


def watched(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    windows: list[tuple[float, float]] = []
    cpu: list[float] = []
    with Job(JobSpec(args.ranks, _NEVER, args.seed, directory, ("--dim", str(args.dim)))) as job:
        job.follow(lambda: None if (newest := job.run_log.newest) and newest.step >= _WARM_UP else 0.05)
        for number in range(_NUM_WINDOWS * args.rounds):
            with contextlib.ExitStack() as held:
                server, urls = _serve(held, directory) if number % 2 else (None, ())
                began, used = time.monotonic(), 0.0 if server is None else _cpu_seconds(server.pid)
                job.follow(EverySecond(functools.partial(_read_all, urls), began, _WATCH_S))
                windows.append((began, time.monotonic()))
                if server is not None:
                    cpu.append((_cpu_seconds(server.pid) - used) / (windows[-1][1] - began))
        job.read()
        times = sorted({line.attempt: line.t for line in reversed(job.run_log.committed)}.values())
    speeds = [_speed(times, *window) for window in windows]
    ratios = [on / off for off, on in zip(speeds[::2], speeds[1::2], strict=True)]
    found = {"ratio": round(statistics.median(ratios), 3), "ratios": [round(ratio, 3) for ratio in ratios]}
    return {"figure": "watched", **found, "asked": 0.99, "server_cpu_percent": round(100 * statistics.mean(cpu), 2)}


class EverySecond:
    """Calls `read` once a second for `for_s` seconds, from `began_s` on, however often the job looks at it."""

    def __init__(self, read: Callable[[], None], began_s: float, for_s: float) -> None:
        self._read, self._next_s, self._until_s = read, began_s, began_s + for_s

    def __call__(self) -> float | None:
        if (now_s := time.monotonic()) > self._until_s:
            return None
        if now_s >= self._next_s:
            self._next_s += 1.0
            self._read()
        return self._next_s - time.monotonic()


def _cpu_seconds(pid: int) -> float:
    """By the scheduler's own count, in nanoseconds: `psutil` has it in steps of 10 ms."""
    nanoseconds = 0
    for path in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that ends
            nanoseconds += int((path / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def _serve(held: contextlib.ExitStack, directory: Path) -> tuple[psutil.Process, list[str]]:
    """Serve the page and the metrics, as `elasticgang run` does, and wait until both answer."""
    listeners = {what: socket.create_server(("127.0.0.1", 0)) for what in ("page", "metrics")}
    ports = [listener.getsockname()[1] for listener in listeners.values()]
    before = set(psutil.Process().children())
    held.enter_context(serve(listeners, str(directory)))
    (server,) = set(psutil.Process().children()) - before
    urls = [f"http://127.0.0.1:{port}/{path}" for port, path in zip(ports, ("status.json", "metrics"), strict=True)]
    _read_all(urls)
    return server, urls


def _read_all(urls: Sequence[str]) -> None:
    for url in urls:
        place = urlsplit(url)
        host, _, port = place.netloc.partition(":")
        with socket.create_connection((host, int(port)), timeout=30.0) as sock:  # urllib would take more time
            sock.sendall(f"GET {place.path} HTTP/1.0\r\nHost: {place.netloc}\r\n\r\n".encode())
            with sock.makefile("rb") as answer:
                assert b" 200 " in answer.readline(1 << 10)
                assert answer.read()


def _speed(times: Sequence[float], began: float, ended: float) -> float:
    inside = [at for at in times if began <= at <= ended]
    return (len(inside) - 1) / (inside[-1] - inside[0])


@contextlib.contextmanager
def busy(num: int) -> Iterator[None]:
    """So many processes compute, each in a session of its own."""
    with contextlib.ExitStack() as held:
        for _ in range(num):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
            held.enter_context(process)
            held.callback(process.kill)
        yield


def measure(args: argparse.Namespace, directory: Path) -> Any:
    rates: dict[str, list[float]] = {"ours": [], "ddp": [], "reproducible": [], "keep": []}
    with busy(args.busy):
        for number in range(args.rounds):
            rates["ours"].append(ours(args, directory / f"ours-{number}"))
            rates["ddp"].append(plain(args, directory / f"ddp-{number}"))
            if not args.busy:
                option = "--reduction=reproducible"
                rates["reproducible"].append(ours(args, directory / f"reproducible-{number}", option))
                rates["keep"].append(ours(args, directory / f"keep-{number}", "--keep"))
    mine, theirs = statistics.median(rates["ours"]), statistics.median(rates["ddp"])
    ratio = statistics.median(a / b for a, b in zip(rates["ours"], rates["ddp"], strict=True))
    found = {"ours": round(mine, 2), "ddp": round(theirs, 2), "ddp_step_ms": round(1e3 / theirs, 1)}
    yield {"figure": "steps_per_s", **found, "ratio": round(ratio, 3), "asked": 0.97, "rounds": args.rounds}
    if args.busy:
        return
    for figure, name, most in (("reproducible_reduction", "reproducible", 1.3), ("kept_slots", "keep", 1.01)):
        ratio = statistics.median(a / b for a, b in zip(rates["ours"], rates[name], strict=True))
        yield {
            "figure": figure,
            "step_ms": round(1e3 / statistics.median(rates[name]), 1),
            "plain_step_ms": round(1e3 / mine, 1),
            "ratio": round(ratio, 3),
            "asked": most,
            "rounds": args.rounds,
        }
    yield watched(args, directory / "watched")
    slow_rate, slow_bytes = coordinator_bytes(args, directory / "slow", ("--dim", str(args.dim)))
    fast_rate, fast_bytes = coordinator_bytes(args, directory / "fast", _FAST)
    yield {
        "figure": "coordinator_calls",
        "slow": {"steps_per_s": round(slow_rate, 1), "bytes_per_s": round(slow_bytes)},
        "fast": {"steps_per_s": round(fast_rate, 1), "bytes_per_s": round(fast_bytes)},
        "bytes_per_step": round((fast_bytes - slow_bytes) / (fast_rate - slow_rate), 1),
        "asked": 0,
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench steady", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=120, help="of each run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs (default: %(default)s)")
    parser.add_argument("--dim", type=int, default=336, help="of the model: how long a step is (default: %(default)s)")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute beside (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    args = parser.parse_args()
    if args.busy < 0:
        parser.error(f"--busy must be at least 0, but is {args.busy} instead")
    if args.ranks < 2 or args.rounds < 1 or args.steps < 2 * _WARM_UP:
        parser.error(f"--ranks must be at least 2, --rounds at least 1, --steps at least {2 * _WARM_UP}")
    return args


def main() -> int:
    args = parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        return print_figures(
            "steady", {"ranks": args.ranks, "busy": args.busy}, measure(args, Path(temporary)), (JobFailedError,)
        )


if __name__ == "__main__":
    sys.exit(main())
