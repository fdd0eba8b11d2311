"""How long the vote of one step takes in a job of several ranks on one host and on several, and what it sends.

Runs jobs whose ranks add up as many numbers as a vote has, many times, and do nothing else. The hosts are agents of
this machine. Every size is run in turn with its ranks on one host, on several, and with an agent for each rank, whose
votes all go by messages. Prints one JSON line per figure:

  vote    `p50_ms` and `p99_ms` of one sum on rank 0; `cpu_ms`: of all ranks and comm processes together, for one sum;
          `segments`, `segments_by_all`: of TCP with data, for one sum, of the comm process that sends most, and of
          all. Gloo sends three for a message: "ready to send", its receiver's "ready to receive", and the numbers. A
          comm process with 3 peers so sends 3 messages in 9 segments. `scripts/bench scale` counts messages.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from scripts.figures import print_figures

_SCRIPT = """\
import json, pathlib, sys, time
import torch
import elasticgang as eg

here, size, num_sums = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
manager = eg.join()
manager.register_state(model=torch.nn.Linear(1, 1))
for step in manager.steps(1):
    with step:
        rank = manager.gangs.root.rank
        values = [float(rank)] * 11
        assert manager.gangs.root.size == size, manager.gangs.root.size
        for number in range(50):
            manager.sum_over_ranks(values)
        (here / f"ready-{rank}").touch()
        while not (here / "go").exists():
            time.sleep(0.01)
        took = []
        for number in range(num_sums):
            began = time.perf_counter()
            sums = manager.sum_over_ranks(values)
            took.append(time.perf_counter() - began)
        assert sums == [size * (size - 1) / 2] * 11, sums
        (here / f"took-{rank}.part").write_text(json.dumps(took))
        (here / f"took-{rank}.part").rename(here / f"took-{rank}")
        while not (here / "done").exists():
            time.sleep(0.01)
        break
manager.leave()
"""
_LIMIT_S = 240.0


class JobFailedError(Exception):
    """Its text says which, and what it printed."""


def _wait(directory: Path, prefix: str, size: int, agents: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while sum(path.suffix == "" for path in directory.glob(f"{prefix}-*")) < size:
        ended = [agent.returncode for agent in agents if agent.poll() is not None]
        if ended or time.monotonic() > deadline:
            raise JobFailedError(f"agents ended with {ended}: {(directory / 'log').read_text()[-2000:]}")
        time.sleep(0.02)


def _processes(agents: list[subprocess.Popen[bytes]]) -> list[psutil.Process]:
    found = [child for agent in agents for child in psutil.Process(agent.pid).children(recursive=True)]
    return [process for process in found if process.name().startswith(("eg-rank", "eg-comm"))]


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _sent(pids: set[int]) -> Counter[int]:
    """Segments with data that each process has sent over TCP."""
    lines = subprocess.run(["ss", "-Htnipo"], capture_output=True, text=True, check=True).stdout.splitlines()
    total: Counter[int] = Counter()
    for head, tail in zip(lines[::2], lines[1::2], strict=True):
        owner = re.search(r"pid=(\d+)", head)
        sent = re.search(r"data_segs_out:(\d+)", tail)
        if owner is not None and sent is not None and int(owner[1]) in pids:
            total[int(owner[1])] += int(sent[1])
    return total


@contextlib.contextmanager
def _job(tree: Path, directory: Path, num_hosts: int, num_ranks: int, sums: int) -> Iterator[Any]:
    """The agents of a job whose ranks are ready. The embedded coordinator of one agent, or one of its own."""
    script = directory / "script.py"
    script.write_text(_SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    started: list[subprocess.Popen[bytes]] = []
    per_host = num_ranks // num_hosts
    run = [sys.executable, "-m", "elasticgang", "run", "--nproc-per-node", str(per_host)]
    arguments = [str(script), str(directory), str(num_ranks), str(sums)]
    with (directory / "log").open("wb") as log:
        try:
            if num_hosts > 1:
                command = [sys.executable, "-m", "elasticgang", "coordinator", "--host", "127.0.0.1", "--port", "0"]
                out = subprocess.PIPE
                coordinator = subprocess.Popen(command, stdout=out, stderr=log, env=env, cwd=tree)
                started.append(coordinator)
                assert coordinator.stdout is not None
                address = coordinator.stdout.readline().decode().rsplit(" ", 1)[-1].strip()
                run += ["--coordinator", address, "--nnodes", f"{num_hosts}:{num_hosts}", "--job-id", "votes"]
            agents = [
                subprocess.Popen([*run, *arguments], stdout=log, stderr=log, env=env, cwd=tree)
                for _ in range(num_hosts)
            ]
            started += agents
            _wait(directory, "ready", num_ranks, agents)
            yield agents
        finally:
            (directory / "done").touch()
            for process in reversed(started):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    if process is not started[0] or num_hosts == 1:
                        process.wait(20.0)
                process.kill()
                process.wait()


def vote(tree: Path, num_hosts: int, num_ranks: int, num_sums: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        with _job(tree, directory, num_hosts, num_ranks, num_sums) as agents:
            processes = _processes(agents)
            pids = {process.pid for process in processes}
            cpu_s, sent = _cpu_s(processes), _sent(pids)
            (directory / "go").touch()
            _wait(directory, "took", num_ranks, agents)
            cpu_s = _cpu_s(processes) - cpu_s
            sent = _sent(pids) - sent
            took = sorted(json.loads((directory / "took-0").read_text()))
    return {
        "p50_ms": round(1000 * statistics.median(took), 3),
        "p99_ms": round(1000 * took[len(took) * 99 // 100], 3),
        "cpu_ms": round(1000 * cpu_s / num_sums, 3),
        "segments": round(max(sent.values(), default=0) / num_sums, 2),
        "segments_by_all": round(sum(sent.values()) / num_sums, 2),
    }


def figures(args: argparse.Namespace) -> Iterator[Mapping[str, Any]]:
    trees = {"this": Path(__file__).resolve().parents[2]}
    if args.beside is not None:
        trees["beside"] = args.beside.resolve()
    for num_ranks in args.ranks:
        for num_hosts in args.hosts:
            for _ in range(args.rounds):
                for name, tree in trees.items():
                    setting = {"figure": "vote", "of": name, "ranks": num_ranks, "hosts": num_hosts}
                    yield {**setting, **vote(tree, num_hosts, num_ranks, args.sums)}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench votes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16, 32], help="(default: 4 8 16 32)")
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 4], help="divisors of each (default: 1 4)")
    parser.add_argument("--sums", type=int, default=1000, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--beside", type=Path, help="another working tree, which is measured in turns with this one")
    args = parser.parse_args()
    if any(ranks % hosts for ranks in args.ranks for hosts in args.hosts):
        parser.error("the number of ranks must be a multiple of the number of hosts")
    return print_figures("votes", {}, figures(args), (JobFailedError,))


if __name__ == "__main__":
    sys.exit(main())
