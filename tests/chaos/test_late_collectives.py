"""Collectives after the vote of a step, in jobs: refused at the first call, in every form.

`test_kills.py` shows the sums that take their place, at every place where a rank may die."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.chaos.training_scripts import training
from tests.support import Job, run_preloaded

pytestmark = pytest.mark.timeout(300)


def late(directory: Path, where: str) -> Path:
    """A script that calls a collective after the vote of each step, or between steps."""
    path = training(directory, steps=3)
    text = path.read_text()
    vote = "        optim.step(weight=slots.num_samples)\n"
    assert text.count(vote) == 1
    call = "eg.all_sum(manager.gangs.dp, 1.0)\n"
    after = {
        "committed": f"        if optim.step(weight=slots.num_samples):\n            {call}",
        "no step is open": f"{vote}    {call}",
    }
    path.write_text(text.replace(vote, after[where]) + '    (here / f"passed-{step.index}").touch()\n')
    return path


# BAN-1
@pytest.mark.parametrize("ranks", [0, 1, 3], ids=["alone", "1 rank", "3 ranks"])
@pytest.mark.parametrize("where", ["committed", "no step is open"])
def test_a_collective_after_the_vote_ends_the_job_in_its_first_step(where: str, ranks: int, tmp_path: Path) -> None:
    path = late(tmp_path, where)
    if ranks:
        with Job(tmp_path, path, ranks=ranks) as job:
            assert job.wait() == 1
            stderr = job.stderr
            job.assert_nothing_left()
    else:
        done = run_preloaded([sys.executable, str(path)], env={"LOCAL_RANK": "0"})
        assert done.returncode == 1
        stderr = done.stderr
    assert "elasticgang.errors.InvalidOperationError: `all_reduce` of the gang" in stderr
    assert where in stderr
    assert "Call it before `optim.step` in the same step, or at the beginning of the next step." in stderr
    assert not list(tmp_path.glob("passed-*"))


FORMS = """\
import json, os, pathlib, sys
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
import elasticgang as eg

here, rank = pathlib.Path(sys.argv[1]), int(os.environ["LOCAL_RANK"])
manager = eg.join(layout=eg.ParallelLayout(sdp=2))


def build(seat):
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=manager.gangs.device_mesh("sdp"))
    model = eg.ShardedDataParallel(manager, model)
    return {"model": model, "optim": eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))}


@torch.compile(backend="eager")
def compiled(part, group):
    return functional.all_reduce(part, "sum", group) + 1


def forms():
    mesh, group, tensor = manager.gangs.device_mesh("sdp"), manager.gangs.sdp.as_process_group(), torch.ones(2)
    parameter = next(state.model.parameters())
    assert isinstance(parameter, DTensor) and parameter.device_mesh.size() == 2
    return {
        "all_reduce": lambda: dist.all_reduce(tensor.clone()),
        "all_reduce of a group": lambda: dist.all_reduce(tensor.clone(), group=group, async_op=True).wait(),
        "all_gather": lambda: dist.all_gather([tensor.clone(), tensor.clone()], tensor, group=group),
        "barrier": dist.barrier,
        "objects": lambda: dist.all_gather_object([None, None], rank, group=group),
        "new_group": lambda: dist.new_group([0, 1]),
        "init_device_mesh": lambda: init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b")),
        "functional": lambda: functional.all_reduce(tensor, "sum", group).clone(),
        "compiled": lambda: compiled(tensor, group),
        "full_tensor": parameter.full_tensor,
        "DTensor": lambda: distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None).sum().full_tensor(),
        "forward of FSDP2": lambda: state.model(torch.ones(1, 4)),
    }


def tried():
    found = {}
    for name, call in forms().items():
        try:
            with torch.no_grad():
                call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = ""
    return found


state = manager.build(build)
found = {}
for step in manager.steps(2):
    with step:
        found["before the vote"] = tried()
        with state.model.accumulate(last=True):
            state.model(torch.ones(1, 4)).sum().backward()
        is_committed = state.optim.step(weight=1.0)
        if step.index == 1:
            found["after it"] = tried()
        assert is_committed
(here / f"found-{rank}").write_text(json.dumps(found))
"""


# BAN-1
def test_every_form_of_torch_is_refused_after_the_vote_and_none_before_it(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(FORMS)
    with Job(tmp_path, path, str(tmp_path), ranks=2) as job:
        assert job.wait() == 0, job.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"found-{rank}").read_text())
        assert set(found["before the vote"].values()) == {""}, found
        assert len(found["after it"]) == 12
        for name, error in found["after it"].items():
            assert error.startswith("InvalidOperationError: `"), (name, error)
            assert "is refused after `optim.step`: the step is committed" in error
