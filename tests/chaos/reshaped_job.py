"""A training job whose model is divided over `sdp`, in a layout with others to fall back to. In double precision, so
that only the order of summation differs between layouts.

`python reshaped_job.py DIRECTORY LAYOUTS STEPS EVERY`. LAYOUTS: as JSON, the sizes of each layout in order. EVERY:
steps between two checkpoints; 0 for none. It appends each committed step, its loss, the `sdp` in force and the
generation to `steps-PID`, and writes `done-PID` with its parts of the parameters and of what AdamW keeps. It waits in
the step that stands in the file `hold`, while that is there, and says so by the file `at-STEP-PID`, and by
`join-STEP-PID` that it knows of a rank that waits to join. It leaves once there is a file `leave-PID`, and raises while
it waits once there is `raise-PID`. With DIE_MOVING in the environment, the rank of this number on its host is killed
when it has sent the first piece of the state that it keeps, once.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import time
from pathlib import Path

import torch

import elasticgang as eg
from elasticgang import testing
from elasticgang.member.step import Step
from tests.chaos.resumed_job import Seen, held
from tests.chaos.resumed_sharded_job import builder, train


def layout_of(text: str) -> eg.ParallelLayout:
    first, *others = (eg.ParallelLayout(**sizes) for sizes in json.loads(text))
    return eg.ParallelLayout(sdp=first.sdp, min_replicas=first.min_replicas, fallback=tuple(others))


def die_once(mark: Path) -> None:
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return
    testing.kill_this_process()


def wait_or_leave(manager: eg.QuorumManager, here: Path, step: Step) -> None:
    """Before the vote on `step`."""
    while held(here / "hold") == step.index:
        (here / f"at-{step.index}-{os.getpid()}").touch()
        if manager.join_noticed:
            (here / f"join-{step.index}-{os.getpid()}").touch()
        if (here / f"raise-{os.getpid()}").exists():
            raise ValueError("as the test wishes")
        step.check()
        time.sleep(0.01)
    if (here / f"leave-{os.getpid()}").exists():
        manager.leave()


def main() -> None:
    here, layouts = Path(sys.argv[1]), sys.argv[2]
    num_steps, every = map(int, sys.argv[3:5])
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    manager = eg.join(layout=layout_of(layouts))
    if os.environ.get("DIE_MOVING") == os.environ.get("LOCAL_RANK", ""):
        testing.fail_at("piece_sent", lambda: die_once(here / "died-moving"))

    state, seen = manager.build(builder(manager)), Seen()
    manager.register_state(seen=seen)
    if every:
        manager.checkpoints(every_steps=every)

    def on_commit(step: Step, loss: float) -> None:
        with open(here / f"steps-{os.getpid()}", "a") as file:
            file.write(f"{step.index} {loss!r} {manager.layout.sdp} {manager.generation}\n")

    result = train(manager, state, seen, num_steps, functools.partial(wait_or_leave, manager, here), on_commit)
    if manager.leave_requested:
        return
    assert seen.indices == list(range(num_steps)), seen.indices
    (here / f"done-{os.getpid()}").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
