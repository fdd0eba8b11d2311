"""A training job whose model is divided over `sdp`, in a layout with others to fall back to. In double precision, so
that only the order of summation differs between layouts.

`python reshaped_job.py DIRECTORY LAYOUTS STEPS EVERY`. LAYOUTS: as JSON, the sizes of each layout in order. EVERY:
steps between two checkpoints; 0 for none. It appends each committed step, its loss, the `sdp` in force and the
generation to `steps-PID`, and writes `done-PID` with its parameters and what AdamW keeps of them, whole. It waits in
the step that stands in the file `hold`, while that is there, and says so by the file `at-STEP-PID`. It leaves once
there is a file `leave-PID`. With DIE_MOVING in the environment, the rank of this number on its host is killed when it
has sent the first piece of the state that it keeps, once.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard

import elasticgang as eg
from elasticgang import testing
from tests.chaos.resumed_job import Seen, held
from tests.chaos.resumed_sharded_job import NUM_SAMPLES, Model, data, whole


def layout_of(text: str) -> eg.ParallelLayout:
    first, *others = (eg.ParallelLayout(**sizes) for sizes in json.loads(text))
    return eg.ParallelLayout(sdp=first.sdp, min_replicas=first.min_replicas, fallback=tuple(others))


def die_once(mark: Path) -> None:
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return
    testing.kill_this_process()


def main() -> None:
    here, layouts = Path(sys.argv[1]), sys.argv[2]
    num_steps, every = map(int, sys.argv[3:5])
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    manager = eg.join(layout=layout_of(layouts))
    if os.environ.get("DIE_MOVING") == os.environ.get("LOCAL_RANK", ""):
        testing.fail_at("piece_sent", lambda: die_once(here / "died-moving"))

    def build(seat: eg.ModelCoordinates) -> dict[str, object]:
        mesh = manager.gangs.device_mesh("sdp")
        assert mesh.size() == manager.layout.sdp
        model = Model()
        for part in (model.up, model.down, model):
            fully_shard(part, mesh=mesh)
        sharded = eg.ShardedDataParallel(manager, model)
        optim = eg.Optimizer(manager, torch.optim.AdamW(sharded.parameters(), lr=0.05))
        return {"model": sharded, "optim": optim}

    state, seen = manager.build(build), Seen()
    manager.register_state(seen=seen)
    if every:
        manager.checkpoints(every_steps=every)
    batches = eg.GlobalBatch(NUM_SAMPLES, size=8, slot=2, seed=5)
    inputs, targets = data()
    result: dict[str, list[float]] = {}
    for step in manager.steps(num_steps):
        with step:
            slots, total = batches.slots(step), torch.zeros((), dtype=torch.float64)
            for slot in slots:
                with state.model.accumulate(last=slot.last):
                    loss = (state.model(inputs[slot.index]) - targets[slot.index]).square().sum()
                    loss.backward()
                total += loss.detach()
            while held(here / "hold") == step.index:
                (here / f"at-{step.index}-{os.getpid()}").touch()
                step.check()
                time.sleep(0.01)
            if (here / f"leave-{os.getpid()}").exists():
                manager.leave()
            seen.indices = [*seen.indices, step.index]
            if state.optim.step(weight=slots.num_samples, max_norm=0.5):
                loss_sum = eg.all_sum(manager.gangs.dp, total).item()
                with open(here / f"steps-{os.getpid()}", "a") as file:
                    file.write(f"{step.index} {loss_sum!r} {manager.layout.sdp} {manager.generation}\n")
                if step.index == num_steps - 1:
                    result = {name: whole(value) for name, value in state.model.module.named_parameters()}
                    moments = state.optim.optim.state.values()
                    result |= {
                        f"{key}.{index}": whole(value)
                        for index, of_parameter in enumerate(moments)
                        for key, value in of_parameter.items()
                    }
    if manager.leave_requested:
        return
    assert seen.indices == list(range(num_steps)), seen.indices
    (here / f"done-{os.getpid()}").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
