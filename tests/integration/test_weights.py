"""The weights of ranks that count the same samples, along `tp` and `pp`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import run_preloaded

JOB = """
import sys
import torch
import elasticgang as eg

form = sys.argv[1]
manager = eg.join()
torch.manual_seed(0)
model = eg.DistributedDataParallel(manager, torch.nn.Linear(2, 1), over="rdp")
optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
manager.register_state(model=model, optim=optim)
batches = eg.GlobalBatch(8, size=8, slot=2)
num_tries = 0
for step in manager.steps(2):
    with step:
        num_tries += 1
        slots, gangs = batches.slots(step), manager.gangs
        for slot in slots:
            with model.accumulate(last=slot.last):
                model(torch.ones(2, 2)).sum().backward()
        is_last = gangs.pp.rank == gangs.pp.size - 1 and gangs.tp.rank == 0
        weight = slots.num_samples
        if form == "of one rank" and not is_last or form == "an error" and num_tries == 1 and is_last:
            weight = 0
        if form == "an error" and num_tries == 1 and is_last:
            manager.report_error(ValueError("of this rank"))
        optim.step(weight=weight)
print("tries:", num_tries)
"""
REFUSED = "InvalidOperationError: the weights of step 0 differ between ranks that count the same samples"


DIES = """
import os, pathlib, signal, sys
import torch
import elasticgang as eg

died = pathlib.Path(sys.argv[1])
manager = eg.join()
model = torch.nn.Linear(2, 1)
optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
manager.register_state(model=model, optim=optim)
for step in manager.steps(100_000):
    with step:
        if os.environ["LOCAL_RANK"] == "3" and step.index == 2 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        parts = manager.gangs.tp.size * manager.gangs.rdp.size
        optim.step(weight=1.0, sums={"back": died.exists() and parts == 4 and step.share is not None})
    if optim.sums.get("back") == 4:
        break
"""


OWN_SAMPLES = """
import sys
import torch
import elasticgang as eg

manager = eg.join()
module = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(module.weight)
model = getattr(eg, sys.argv[1])(manager, module)
optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=1.0))
manager.register_state(model=model, optim=optim)
num_learned = 0.0
for step in manager.steps(3):
    with step:
        num_learned += step.share is None
        with model.accumulate(last=True):
            model(torch.ones(5, 1)).sum().backward()
        optim.step(weight=5.0)
print("learned:", num_learned, "weight:", module.weight.item())
"""


APART = """
import sys
import torch
from torch.distributed.fsdp import fully_shard
import elasticgang as eg

form = sys.argv[1]
manager = eg.join()


class Branching(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))

    def forward(self, x, which):
        return self.branches[which](x)


def build(seat):
    module, mesh = Branching(), manager.gangs.device_mesh("sdp")
    for part in (module,) if form == "in one" else (*module.branches, module):
        fully_shard(part, mesh=mesh)
    model = eg.ShardedDataParallel(manager, module)
    return {"model": model, "optim": eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))}


state = manager.build(build)
if form.startswith("/"):
    manager.checkpoints(form, every_steps=100)
batches = eg.GlobalBatch(8, size=8, slot=2)
for step in manager.steps(3):
    with step:
        slots = batches.slots(step)
        for slot in slots:
            with state.model.accumulate(last=slot.last):
                which = (slot.number // 2 + manager.gangs.sdp.rank * (step.index == 2 and form[0] != "/")) % 2
                state.model(torch.ones(2, 2), which).sum().backward()
        state.optim.step(weight=slots.num_samples)
"""


def run(tmp_path: Path, layout: str, ranks: int, form: str, text: str = JOB) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "job.py"
    script.write_text(text)
    launcher = ["-m", "elasticgang", "run", "--nproc-per-node", str(ranks), "--layout", layout]
    return run_preloaded([sys.executable, *launcher, str(script), form], timeout=60)


# AGREEMENT-3
@pytest.mark.parametrize(("layout", "ranks"), [("pp=2", 2), ("tp=2", 2), ("sdp=2,tp=2", 4)])
def test_a_weight_that_one_of_the_ranks_gives_alone_is_refused(layout: str, ranks: int, tmp_path: Path) -> None:
    done = run(tmp_path, layout, ranks, "of one rank")
    assert done.returncode == 1
    assert REFUSED in done.stderr


@pytest.mark.parametrize(("form", "num_tries"), [("of all", 2), ("an error", 3)])
def test_equal_weights_pass_and_so_does_any_weight_of_a_rank_that_reports_an_error(
    form: str, num_tries: int, tmp_path: Path
) -> None:
    done = run(tmp_path, "pp=2", 2, form)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"tries: {num_tries}") == 2


def test_an_active_rank_whose_group_has_a_learner_may_give_any_weight(tmp_path: Path) -> None:
    """As a script does that divides the samples by itself."""
    done = run(tmp_path, "tp=2,min_replicas=2", 4, str(tmp_path / "died"), DIES)
    assert done.returncode == 0, done.stderr
    assert "was killed by SIGKILL" in done.stderr


# AGREEMENT-4, SHARDED-12
def test_ranks_along_sdp_that_run_different_modules_of_one_size_are_refused(tmp_path: Path) -> None:
    """Both run both in the step, in another order. Otherwise each would get halves of both, without an error."""
    done = run(tmp_path, "sdp=2", 2, "in another order", APART)
    assert done.returncode == 1
    assert "ranks along `sdp` have run different modules of `fully_shard` in step 2" in done.stderr
    runs = [f"forward of branches.{which}, gradients of branches.{which}" for which in (0, 1)]
    told = [f"This rank has run: {', '.join(order)}" for order in (runs, runs[::-1])]
    assert any(each in done.stderr for each in told), done.stderr  # a rank may end the step before the other has raised


# AGREEMENT-4, SHARDED-12
def test_ranks_along_sdp_that_have_gradients_of_different_parameters_of_one_size_are_refused(tmp_path: Path) -> None:
    """Of one module: each has run one branch of it in each slot."""
    done = run(tmp_path, "sdp=2", 2, "in one", APART)
    assert done.returncode == 1
    assert "ranks along `sdp` have run different modules of `fully_shard` in step 2" in done.stderr
    told = [f"gradients of the whole module without branches.{which}.weight, branches.{which}.bias" for which in (0, 1)]
    assert any(each in done.stderr for each in told), done.stderr  # as above


# AGREEMENT-4
def test_a_sum_outside_of_a_step_counts_no_exchanges(tmp_path: Path) -> None:
    """As that of the ranks that wait for the last checkpoint."""
    done = run(tmp_path, "sdp=2", 2, str(tmp_path / "checkpoints"), APART)
    assert done.returncode == 0, done.stderr
    assert any((tmp_path / "checkpoints").glob("step-*3-*"))


# DRIVER-10
@pytest.mark.parametrize("wrapper", ["DistributedDataParallel", "ShardedDataParallel"])
def test_a_rank_that_heals_adds_no_gradients_of_samples_that_its_script_has_chosen(
    wrapper: str, tmp_path: Path
) -> None:
    """The gradient of each sample is 1, so that each step must change the parameter by 1."""
    done = run(tmp_path, "sdp=1", 2, wrapper, OWN_SAMPLES)
    assert done.returncode == 0, done.stderr
    assert sorted(line.partition("learned:")[2] for line in done.stdout.splitlines() if "learned:" in line) == [
        " 0.0 weight: -3.0",
        " 1.0 weight: -3.0",
    ]
