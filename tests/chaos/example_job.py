"""Runs a script of `examples/`, which may die at the places that it is told to, and writes which samples each step had.

`python example_job.py EXAMPLE STEPS DIRECTORY FAULTS`: the faults are those of `job.py`.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import elasticgang as eg
from tests.chaos.job import Faults, History, digest_of


def main() -> None:
    example, num_steps, directory, specs = sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4])
    faults = Faults(directory, specs, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    join, slots_of_step, vote = eg.join, eg.GlobalBatch.slots, eg.Optimizer.step
    seen: dict[str, Any] = {}

    def joined(**options: Any) -> eg.QuorumManager:
        manager = seen["manager"] = join(**options)
        seen["history"] = History(directory / "history", manager.member)
        faults.install(manager)
        return manager

    def slots(batches: eg.GlobalBatch, step: Any) -> Any:
        faults.wait_for_company()
        share = slots_of_step(batches, step)
        seen["attempt"] = {"step": step.index, "generation": step.generation}
        seen["samples"] = [int(sample) for place in range(len(share)) for sample in share[place].index]
        return share

    def voted(optim: eg.Optimizer, **options: Any) -> bool:
        faults.at("body")
        seen["optim"] = optim
        seen["history"].write("prepared", **seen["attempt"], samples=seen["samples"])
        if not vote(optim, **options):
            return False
        tip = seen["manager"].tip
        seen["history"].write("committed", step=seen["attempt"]["step"], generation=tip.generation)
        return True

    eg.join, eg.GlobalBatch.slots, eg.Optimizer.step = joined, slots, voted  # type: ignore[method-assign, assignment]
    sys.argv = [example, "--steps", num_steps]
    runpy.run_path(example, run_name="__main__")
    if seen["manager"].committed_steps == int(num_steps):
        seen["history"].write("finished", digest=digest_of(seen["optim"].state_dict()))


if __name__ == "__main__":
    main()
