"""Runs programs in one of four modes, and keeps what each gave on each rank: a file a program and rank.

    gloo        plain torch: `init_process_group("gloo")`, in processes with the environment that torchrun sets
    gloo-gang   the same, with the default process group of a `ProcessGroupGang`, which programs are given
    backend     `init_process_group("elasticgang")`, programs unchanged
    run         a rank of `elasticgang run`: one program in each step, unchanged

A program that raises is an outcome too. Static groups are used on after it if it raised on every rank; otherwise the
process ends, and the caller starts another one with the programs that are left.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import inspect
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

import elasticgang as eg
from tests.integration.forked_ranks import fork_ranks
from tests.integration.programs.catalog import Program, programs

STATIC = ("gloo", "gloo-gang", "backend")
MODES = (*STATIC, "run")
TIMEOUT = timedelta(seconds=30)  # of a collective; some programs fail by it where a mode has a defect


@dataclass(frozen=True)
class Outcome:
    """Of one program on one rank: its values, or the traceback of what it raised."""

    values: dict[str, Any]
    error: str = ""


def outcome_file(output: Path, name: str, rank: int) -> Path:
    return output / f"{name}-{rank}.pt"


def started_file(output: Path, name: str) -> Path:
    return output / f"{name}.started"


def read(output: Path, name: str, rank: int) -> Outcome | None:
    """None: the rank has not come to the program's end."""
    path = outcome_file(output, name, rank)
    return Outcome(*torch.load(path, weights_only=False)) if path.exists() else None


def perform(program: Program, output: Path, rank: int, group: dist.ProcessGroup | None = None) -> Outcome:
    try:
        takes_group = "group" in inspect.signature(program.function).parameters
        outcome = Outcome(program.function(group) if takes_group else program.function())
    except Exception:
        outcome = Outcome({}, traceback.format_exc())
    path = outcome_file(output, program.name, rank)
    torch.save((outcome.values, outcome.error), path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)
    return outcome


# -- static modes


def _static_rank(mode: str, names: Sequence[str], output: Path, rank: int, size: int, port: int) -> int:
    roll = PrefixStore("ended", TCPStore("127.0.0.1", port, is_master=False))
    group = None
    if mode == "gloo-gang":
        gang = eg.ProcessGroupGang.create_default_process_group("cpu", timeout=TIMEOUT)
        group = gang.as_process_group()
    else:
        dist.init_process_group("gloo" if mode == "gloo" else "elasticgang", timeout=TIMEOUT)
    found = programs()
    for name in names:
        started_file(output, name).touch()
        outcome = perform(found[name], output, rank, group)
        if not _is_usable(roll, name, rank, size, outcome):
            return 3
    group = None
    dist.destroy_process_group()
    gc.collect()  # a Gloo group that outlives the interpreter can end it by SIGABRT
    return 0


def _is_usable(roll: PrefixStore, name: str, rank: int, size: int, outcome: Outcome) -> bool:
    """Whether the program ended alike on every rank, and the default group works. Waits for them."""
    roll.set(f"{name}/{rank}", "raised" if outcome.error else "returned")
    keys = [f"{name}/{other}" for other in range(size)]
    try:
        roll.wait(keys, 2 * TIMEOUT)
    except dist.DistStoreError:
        return False
    if len({roll.get(key) for key in keys}) > 1:
        return False
    if outcome.error:
        try:
            dist.barrier()
        except Exception:
            return False
    return True


# -- under `elasticgang run`


def run(names: Sequence[str], output: Path) -> None:
    """One program in each step. A step that is lost is tried again without its program."""
    found = programs()
    manager = eg.join()
    manager.register_state(model=torch.nn.Linear(1, 1))
    for step in manager.steps(len(names)):
        with step:
            name = names[step.index]
            if _is_first_try(output, name, step.generation):
                perform(found[name], output, manager.gangs.root.rank)
            manager.commit(1.0, lambda total: None)


def _is_first_try(output: Path, name: str, generation: int) -> bool:
    path = started_file(output, name)
    mine = path.with_suffix(f".{os.getpid()}")
    mine.write_text(str(generation))
    with contextlib.suppress(FileExistsError):
        os.link(mine, path)  # whole, or not at all
    mine.unlink()
    return path.read_text() == str(generation)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--size", type=int, default=4)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("names", nargs="+")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.mode == "run":
        run(args.names, args.output)
    else:
        programs()  # before the forks, so that they need not import it
        size = args.size
        sys.exit(
            fork_ranks(size, lambda rank, port: _static_rank(args.mode, args.names, args.output, rank, size, port))
        )


if __name__ == "__main__":
    main()
