"""Elastic jobs whose ranks share one device, over isolated Gloo: NCCL refuses two ranks on one device."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest

from tests.chaos.training_scripts import script
from tests.gpu.figures import note
from tests.support import Job, is_alive, kill, wait_until

HEAL_S = 300.0  # a guard
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

HEAD = """\
import hashlib, os, pathlib, sys, time
import torch
from torch import nn
import elasticgang as eg

here, rank = pathlib.Path({here!r}), int(os.environ["LOCAL_RANK"])
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)


def digest(model):
    data = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(data).hexdigest()

"""

# The gradients of all slots are summed in one order, so that the parameters depend on the samples alone.
TRAINS = """\
manager = eg.join(device="cuda:0", process_group="isolated-gloo")
module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 8)).cuda()
model = eg.DistributedDataParallel(manager, module, reduction="reproducible")
optim = eg.Optimizer(manager, torch.optim.AdamW(module.parameters(), lr=1e-2))
data = torch.randn(512, 64, generator=torch.Generator().manual_seed(1)).cuda()
batches = eg.GlobalBatch(512, size=32, slot=4, seed=3)
manager.register_state(model=model, optim=optim)
{setup}
tried = []
for step in manager.steps({steps}):
    with step:
        tried.append(step.index)
        slots = batches.slots(step)
        for slot in slots:
            with model.accumulate(last=slot.last):
                model(data[slot.index.cuda()]).square().sum().backward()
        optim.step(weight=slots.num_samples, max_norm=1.0)
print("began with", tried[0])
print("digest", digest(module))
"""


def trains(steps: int, setup: str = "") -> str:
    return TRAINS.format(steps=steps, setup=setup)


def digests(job: Job) -> set[str]:
    return {line.split("digest ")[1] for line in job.stdout.splitlines() if "digest " in line}


def await_entry(job: Job, local_rank: int) -> int:
    """The process of the rank, once it has entered a generation."""

    def found() -> int | None:
        of_rank = [event for event in job.events() if event.get("local_rank") == local_rank]
        names = [event["event"] for event in of_rank if event["event"] in ("spawned", "entered")]
        pid = job.rank_pid(local_rank)
        return pid if names[-1] == "entered" and is_alive(pid) else None

    job.expect("spawned", local_rank=local_rank)
    return wait_until(found, f"an entry of rank {local_rank}")


def run(directory: Path, text: str, ranks: int, num_kills: int = 0, **options: str) -> Job:
    """The job, ended."""
    directory.mkdir()
    path = script(directory, HEAD.format(here=str(directory)) + text)
    given = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    chooser = random.Random(5)
    with Job(directory, path, ranks=ranks, options=given, env=DETERMINISTIC) as job:
        for _ in range(num_kills):
            pids = [await_entry(job, local_rank) for local_rank in range(ranks)]
            kill(chooser.choice(pids))
        assert job.wait(500) == 0, job.stderr
    return job


@pytest.mark.timeout(600)
def test_four_ranks_that_share_a_device_are_killed_at_random_and_end_in_the_bits_of_one(tmp_path: Path) -> None:
    undisturbed = run(tmp_path / "alone", trains(400), ranks=1)
    began = time.monotonic()
    attacked = run(tmp_path / "attacked", trains(400), ranks=4, num_kills=3)
    note(
        "four ranks on one device, three kills",
        seconds=round(time.monotonic() - began, 1),
        changes=re.findall(r"\d+ ms \(.*\)", attacked.stderr),
    )
    assert len(digests(undisturbed)) == 1
    assert digests(attacked) == digests(undisturbed)


@pytest.mark.timeout(600)
def test_a_job_goes_on_from_its_checkpoint_of_a_device_in_the_same_bits(tmp_path: Path) -> None:
    setup = f"manager.checkpoints({str(tmp_path / 'checkpoints')!r}, every_steps=10)"
    undisturbed = run(tmp_path / "alone", trains(40), ranks=2)
    run(tmp_path / "first", trains(20, setup), ranks=2)
    resumed = run(tmp_path / "second", trains(40, setup), ranks=3)
    assert len(digests(undisturbed)) == 1
    assert digests(resumed) == digests(undisturbed)
    assert resumed.stdout.count("began with 20") == 3


# Each trains for some steps on two ranks, and prints its digest.
WAYS = {
    "ddp under bf16": """\
manager = eg.join(device="cuda:0", process_group="isolated-gloo")
module = nn.Linear(64, 64).cuda()
model = eg.DistributedDataParallel(manager, module)
optim = eg.Optimizer(manager, torch.optim.SGD(module.parameters(), lr=0.1))
extra = {}
cast = lambda: torch.autocast("cuda", torch.bfloat16)
loss_of = lambda x: model(x).float().square().sum()
""",
    "ddp under fp16 with scaled gradients": """\
manager = eg.join(device="cuda:0", process_group="isolated-gloo")
module = nn.Linear(64, 64).cuda()
model = eg.DistributedDataParallel(manager, module)
scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)  # the first steps overflow
optim = eg.Optimizer(manager, torch.optim.SGD(module.parameters(), lr=0.1), scaler=scaler)
extra = {"scaler": scaler}
cast = lambda: torch.autocast("cuda", torch.float16)
loss_of = lambda x: scaler.scale(model(x).float().square().sum())
""",
    "compiled": """\
manager = eg.join(device="cuda:0", process_group="isolated-gloo")
module = nn.Linear(64, 64).cuda()
model = eg.DistributedDataParallel(manager, module)
optim = eg.Optimizer(manager, torch.optim.SGD(module.parameters(), lr=0.1))
extra = {}
compiled = torch.compile(module)
cast = lambda: torch.autocast("cuda", enabled=False)
loss_of = lambda x: model(x).square().sum() + 0 * compiled(x).sum()
""",
    "checkpointed activations": """\
from torch.utils.checkpoint import checkpoint
manager = eg.join(device="cuda:0", process_group="isolated-gloo")
inner = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1))

class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)

module = Module().cuda()
model = eg.DistributedDataParallel(manager, module)
optim = eg.Optimizer(manager, torch.optim.SGD(module.parameters(), lr=0.1))
extra = {}
cast = lambda: torch.autocast("cuda", enabled=False)
loss_of = lambda x: model(x).square().sum()
""",
}
STEPS = """
data = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).cuda()
batches = eg.GlobalBatch(64, size=8, slot=2, seed=3)
manager.register_state(model=model, optim=optim, **extra)
for step in manager.steps(20):
    with step:
        slots = batches.slots(step)
        for slot in slots:
            with model.accumulate(last=slot.last):
                with cast():
                    loss = loss_of(data[slot.index.cuda()])
                loss.backward()
        optim.step(weight=slots.num_samples, max_norm=1.0)
assert all(parameter.isfinite().all() for parameter in module.parameters())
print("digest", digest(module))
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS)
def test_ranks_train_alike_in_every_way(way: str, tmp_path: Path) -> None:
    text = WAYS[way] + STEPS
    assert len(digests(run(tmp_path / "job", text, ranks=2))) == 1


SHARDED = """\
from torch.distributed.fsdp import fully_shard
layout = eg.ParallelLayout(sdp=2)
manager = eg.join(layout=layout, device="cuda:0", process_group="isolated-gloo")


def build(part):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
    mesh = manager.gangs.device_mesh("sdp")
    for layer in (module[0], module[2], module):
        fully_shard(layer, mesh=mesh)
    model = eg.ShardedDataParallel(manager, module)
    optim = eg.Optimizer(manager, torch.optim.AdamW(module.parameters(), lr=1e-2))
    return {"model": model, "optim": optim}


seat = manager.build(build)
data = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).cuda()
batches = eg.GlobalBatch(64, size=8, slot=2, seed=3)
for step in manager.steps(20):
    with step:
        model, optim = seat.model, seat.optim
        slots = batches.slots(step)
        for slot in slots:
            with model.accumulate(last=slot.last):
                model(data[slot.index.cuda()]).square().sum().backward()
        optim.step(weight=slots.num_samples, max_norm=1.0)
print("finished", manager.committed_steps)
"""


@pytest.mark.timeout(600)
def test_fsdp2_trains_on_a_device(tmp_path: Path) -> None:
    job = run(tmp_path / "job", SHARDED, ranks=2)
    assert job.stdout.count("finished 20") == 2


# On every rank a part, or a stage, in two replica groups. Rank 0 dies once, in step 5.
PARTS = """
data = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).cuda()
batches = eg.GlobalBatch(64, size=8, slot=2, seed=3)
for step in manager.steps(20):
    with step:
        slots = batches.slots(step)
        train(seat.model, slots)
        if step.index == 5 and rank == 0 and not (here / "killed").exists():
            (here / "killed").touch()
            os.kill(os.getpid(), 9)
        seat.optim.step(weight=slots.num_samples, max_norm=1.0)
print("finished", manager.committed_steps)
"""
TENSORS = """\
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
manager = eg.join(layout=eg.ParallelLayout(sdp=2, tp=2), device="cuda:0", process_group="isolated-gloo")


def build(part):
    torch.manual_seed(0)
    mesh = manager.gangs.device_mesh("sdp", "tp")
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()}, src_data_rank=None)
    fully_shard(module, mesh=mesh["sdp"])
    model = eg.ShardedDataParallel(manager, module)
    return {"model": model, "optim": eg.Optimizer(manager, torch.optim.AdamW(module.parameters(), lr=1e-2))}


def train(model, slots):
    for slot in slots:
        with model.accumulate(last=slot.last):
            model(data[slot.index.cuda()]).square().sum().backward()


seat = manager.build(build)
"""
STAGES = """\
manager = eg.join(layout=eg.ParallelLayout(pp=2), device="cuda:0", process_group="isolated-gloo")
meta = torch.empty(2, 64, device="meta")


def build(part):
    torch.manual_seed(part.pp)
    stage = nn.Sequential(nn.Linear(64, 64), nn.Tanh()).cuda()
    model = eg.PipelineParallel(manager, stage, inputs=meta, outputs=meta, loss_sum=lambda out, _: out.square().sum())
    return {"model": model, "optim": eg.Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=1e-2))}


def train(model, slots):
    taken = [slot.index for slot in slots]
    inputs = data[torch.cat(taken).cuda()] if taken else None
    model.run(slots, inputs, inputs)


seat = manager.build(build)
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("text", "ranks"), [(TENSORS, 8), (STAGES, 4)], ids=["tp and fsdp2", "pipeline"])
def test_a_part_of_a_state_on_a_device_survives_its_rank(text: str, ranks: int, tmp_path: Path) -> None:
    job = run(tmp_path / "job", text + PARTS, ranks=ranks)
    assert job.stdout.count("finished 20") == ranks
    assert (tmp_path / "job" / "killed").exists()


# 2.7 GB of parameters and 5.4 GB of moments, and a parameter group's 2.7 GB of gradients beside them.
WIDTH = 26_000
LARGE = """\
manager = eg.join(device="cuda:0", process_group="isolated-gloo")
module = nn.Linear({width}, {width}, bias=False, device="cuda:0")
model = eg.DistributedDataParallel(manager, module)
optim = eg.Optimizer(manager, torch.optim.AdamW(module.parameters(), fused=True))
manager.register_state(model=model, optim=optim)
heals = (here / "began").exists()  # a process that starts later
for step in manager.steps(10**9):
    with step:
        if manager.committed_steps == 2:
            (here / "began").write_text("\\n")
        if heals and optim.optim.state:  # it has healed
            (here / "new").write_text(f"{{torch.cuda.max_memory_allocated()}}\\n")
            os.replace(here / "new", here / "peak")
        slots = eg.GlobalBatch(8, size=2, slot=1).slots(step)
        for slot in slots:
            with model.accumulate(last=slot.last):
                model(torch.ones(1, {width}, device="cuda")).sum().backward()
        optim.step(weight=slots.num_samples)
        if (here / "peak").exists():
            break
"""


@pytest.mark.timeout(600)
def test_a_large_state_is_healed_with_one_copy_of_it_on_the_device(tmp_path: Path) -> None:
    """Of 8.1 GB, beside 2.7 GB of buckets for gradients and the 2.7 GB of zeros that a rank without samples reduces."""
    directory = tmp_path / "job"
    directory.mkdir()
    path = script(directory, HEAD.format(here=str(directory)) + LARGE.format(width=WIDTH))
    with Job(directory, path, ranks=2) as job:
        job.expect_file(directory / "began")
        kill(job.rank_pid(1))
        began = time.monotonic()
        wait_until((directory / "peak").exists, "the killed rank has healed", HEAL_S)
        seconds = time.monotonic() - began
        spawned = [event for event in job.events() if event["event"] == "spawned" and event["local_rank"] == 1]
        healed = job.expect("healed", member=spawned[-1]["member"])
        peak = int(job.expect_file(directory / "peak"))
    num_bytes = healed["bytes"]
    note("heal of a device's state", bytes=num_bytes, seconds=round(seconds, 1), peak_bytes=peak)
    assert num_bytes > WIDTH**2 * 4 * 3
    assert peak < WIDTH**2 * 4 * 5 * 1.1, "parameters, two moments, buckets, and zeros"
