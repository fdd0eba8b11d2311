"""A rank of an elastic job whose gradients are averaged over a `ManagedProcessGroup`. The last rank dies once in the
middle of a step. Each active member's gradient is 1, and so must their average be, whoever is there."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed import ReduceOp

import elasticgang as eg
from tests.support import wait_until

RATE = 0.25  # exact in binary
KILLED_AT = 4
MORE_STEPS = 3


def main() -> None:
    directory, rank = Path(sys.argv[1]), int(os.environ["LOCAL_RANK"])
    died, went_on = directory / "died", directory / "went-on"
    if died.exists() and rank == 2:  # comes back once the others have a step without it, however late they are
        wait_until(went_on.exists, "a step of the others", 60)
    manager = eg.join()
    pg = eg.ManagedProcessGroup(manager)
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    manager.register_state(module=module)
    sizes: list[tuple[int, int]] = []
    errors: list[bool] = []
    whole_again = 0
    for step in manager.steps(10**6):
        with step:
            is_learner = step.share is None
            module.weight.grad = torch.zeros(1, 1)
            if not is_learner:
                torch.autograd.backward(module(torch.ones(1, 1)).sum())
            if step.index == KILLED_AT and not died.exists():
                (directory / f"in-{rank}").touch()
                if rank == 2:  # once the others are in this step, so that they notice the death in it
                    wait_until(lambda: all((directory / f"in-{other}").exists() for other in (0, 1)), "the others", 60)
                    died.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            assert module.weight.grad is not None
            assert pg.rank() == manager.gangs.dp.rank
            pg.allreduce([module.weight.grad], ReduceOp.AVG).wait()
            ends = torch.tensor([float(whole_again >= MORE_STEPS)])
            pg.allreduce([ends], ReduceOp.MAX).get_future().wait()
            finite = bool(module.weight.grad.isfinite().all())
            errors.append(pg.errored() is not None)
            agree = errors[-1] == manager.poisoned
            size = (pg.size(), manager.gangs.dp.size)
            if manager.commit(1.0, lambda total: module.weight.data.sub_(RATE * module.weight.grad)):  # type: ignore[arg-type, operator]
                assert module.weight.item() == -RATE * (step.index + 1), (step, size)
                if not sizes or sizes[-1] != size:
                    sizes.append(size)
                if size == (2, 2):
                    went_on.touch()
                whole_again = whole_again + 1 if died.exists() and size == (3, 3) else 0
        assert finite  # not within the step, which drops what is raised once it is lost
        assert agree
        if step.committed and ends.item():
            break
    found = {"sizes": sizes, "weight": module.weight.item(), "errors": sum(errors)}
    (directory / f"rank{rank}").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
