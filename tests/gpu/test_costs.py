"""What elasticity costs on a device. Figures, with bounds that only a defect exceeds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.training_scripts import script
from tests.gpu.figures import note
from tests.support import Job

# A transformer of about 100 million parameters.
MODEL = """\
import json, os, time
import torch
from torch import nn

layer = lambda: nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True)
make = lambda: nn.TransformerEncoder(layer(), 8, enable_nested_tensor=False).cuda()
data = torch.randn(8, 128, 1024, generator=torch.Generator().manual_seed(0))
STEPS, WARM = 60, 20


class Clock:
    def __init__(self):
        self.number = 0

    def tick(self):
        self.number += 1
        if self.number == WARM:
            torch.cuda.synchronize()
            self.began = time.monotonic()
        if self.number == STEPS:
            torch.cuda.synchronize()
            print("figure", json.dumps((time.monotonic() - self.began) / (STEPS - WARM)))

"""
PLAIN = """\
import torch.distributed as dist

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
model = nn.parallel.DistributedDataParallel(make(), gradient_as_bucket_view=True)
optim = torch.optim.AdamW(model.parameters())
clock, batch = Clock(), data.cuda()
for _ in range(STEPS):
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(batch).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad(set_to_none=True)
    clock.tick()
dist.destroy_process_group()
"""
OURS = """\
import elasticgang as eg

manager = eg.join(device="cuda:0", process_group={process_group!r})
module = make()
model = eg.DistributedDataParallel(manager, module)
optim = eg.Optimizer(manager, torch.optim.AdamW(module.parameters()))
manager.register_state(model=model, optim=optim)
clock, batch = Clock(), data.cuda()
batches = eg.GlobalBatch(8, size=8, slot=8)
for step in manager.steps(STEPS):
    with step:
        slots = batches.slots(step)
        for slot in slots:
            with model.accumulate(last=slot.last):
                with torch.autocast("cuda", torch.bfloat16):
                    loss = model(batch).square().mean() * slot.num_samples
                loss.backward()
        optim.step(weight=slots.num_samples)
    clock.tick()
"""


def seconds_in(output: str) -> float:
    (line,) = [line for line in output.splitlines() if "figure " in line]
    return float(json.loads(line.split("figure ")[1]))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("process_group", ["nccl", "isolated-nccl"])
def test_a_step_beside_plain_ddp(process_group: str, tmp_path: Path) -> None:
    """Of one rank: what the votes, the marks and the looks at the groups cost, without a network."""
    path = tmp_path / "plain.py"
    path.write_text(MODEL + PLAIN)
    plain = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=280)
    assert plain.returncode == 0, plain.stderr
    with Job(tmp_path, script(tmp_path, MODEL + OURS.format(process_group=process_group)), ranks=1) as job:
        assert job.wait(280) == 0, job.stderr
    before, after = seconds_in(plain.stdout), seconds_in(job.stdout)
    figures = {"ddp_ms": round(1e3 * before, 2), "elasticgang_ms": round(1e3 * after, 2)}
    note("a step of 100 million parameters", process_group=process_group, **figures, ratio=round(after / before, 3))
    assert after < 1.5 * before
