"""Survivors of a death halt their comm processes, and kill them after the next commit."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.training_scripts import script
from tests.support import Job

# A survivor waits outside of all collectives for the agent's notice.
SCRIPT = """\
import os, pathlib, signal
import torch
import elasticgang as eg
from elasticgang.comm import comm_process
from elasticgang.process.stop_fence import is_halted
from tests.integration.comm_calls import settle
from scripts.chaos_runs.soaking.comm_processes import comm_processes
from tests.support import is_alive, wait_until

comm_process.HALTED_S = 600.0  # the commit alone kills it
comm_process.HALT_TIMEOUT_S = 60.0
here, rank = pathlib.Path({here!r}), int(os.environ["LOCAL_RANK"])
manager = eg.join()
model = eg.DistributedDataParallel(manager, torch.nn.Linear(2, 1))
optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
manager.register_state(model=model, optim=optim)
former = None
for step in manager.steps(4):
    with step:
        if manager.generation == 1 and step.index == 2:
            if rank == 1:  # once both others are in this step
                wait_until(lambda: all((here / f"ready-{{other}}").exists() for other in (0, 2)), "the others", 60)
                os.kill(os.getpid(), signal.SIGKILL)
            former = comm_processes(os.getpid())[0]
            settle(former)
            (here / f"ready-{{rank}}").touch()
            wait_until(lambda: is_halted(former), "the halt", 60)
        elif former is not None and step.index == 2:
            (here / f"before-{{rank}}").write_text(f"{{is_halted(former)}}\\n")
        elif former is not None and step.index == 3:
            wait_until(lambda: not is_alive(former), "its end", 60)
            (here / f"after-{{rank}}").write_text("gone\\n")
        with model.accumulate(last=True):
            model(torch.ones(1, 2)).sum().backward()
        optim.step(weight=1)
"""


# RENDEZVOUS-3
def test_a_survivor_kills_its_former_comm_process_after_the_next_commit(tmp_path: Path) -> None:
    with Job(tmp_path, script(tmp_path, SCRIPT.format(here=str(tmp_path))), ranks=3) as job:
        assert job.wait() == 0, job.stderr
        job.assert_nothing_left()
    for rank in (0, 2):
        assert (tmp_path / f"before-{rank}").read_text() == "True\n"
        assert (tmp_path / f"after-{rank}").read_text() == "gone\n"
