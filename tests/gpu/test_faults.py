"""Faults of a device, and what is none. One device is enough: the ranks share it, over isolated Gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.training_scripts import script
from tests.support import Job

# Rank 1 does `what` in step 4, once. The job ends when its next process has taken a step.
FAULT = """\
import os, pathlib
import torch
import elasticgang as eg

here, rank = pathlib.Path({here!r}), os.environ["LOCAL_RANK"]
is_next = (here / "failed").exists()
manager = eg.join(device="cuda:0", process_group="isolated-gloo")
module = torch.nn.Linear(4, 4).cuda()
optim = eg.Optimizer(manager, torch.optim.SGD(module.parameters(), lr=0.1))
manager.register_state(model=module, optim=optim)
for step in manager.steps(10**9):
    with step:
        module(torch.ones(1, 4, device="cuda")).sum().backward()
        if step.index >= 4 and rank == "1" and not is_next:
            (here / "failed").touch()
            {what}
            torch.cuda.synchronize()
        if optim.step(weight=1.0) and rank == "1" and is_next:
            (here / "returned").touch()
    if (here / "returned").exists():
        break
print("finished")
"""
ILLEGAL = """source = 'extern "C" __global__ void write() { *(volatile int*)1 = 7; }'
            torch.cuda._compile_kernel(source, "write")((1, 1, 1), (1, 1, 1), ())"""
ENDLESS = "torch.cuda._sleep(10**15)"
TOO_LARGE = 'torch.empty(10**14, device="cuda")'
ASSERTION = 'torch.ones(4, device="cuda")[torch.tensor([9], device="cuda")]'


def job(directory: Path, what: str, *options: str) -> Job:
    return Job(directory, script(directory, FAULT.format(here=str(directory), what=what)), ranks=2, options=options)


@pytest.mark.timeout(300)
def test_an_illegal_access_ends_one_process_and_its_rank_returns(tmp_path: Path) -> None:
    with job(tmp_path, ILLEGAL, "--max-restarts", "0") as running:
        assert running.wait(250) == 0, running.stderr
        fault = running.expect("device_fault", local_rank=1, is_chosen=True, is_quarantined=False)
        assert fault["uuid"].startswith("GPU-"), "that of the device which both ranks share"
        assert running.stdout.count("finished") == 2


@pytest.mark.timeout(300)
def test_a_kernel_that_never_ends_is_found_as_a_hang(tmp_path: Path) -> None:
    with job(tmp_path, ENDLESS, "--hang-timeout", "10") as running:
        assert running.wait(250) == 0, running.stderr
        running.expect("hung", local_rank=1)
        assert running.stdout.count("finished") == 2


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("what", "text"),
    [(TOO_LARGE, "CUDA out of memory"), (ASSERTION, "CUDA error: device-side assert triggered")],
    ids=["out of memory", "an assertion in a kernel"],
)
def test_the_scripts_own_error_is_none_of_the_device(what: str, text: str, tmp_path: Path) -> None:
    with job(tmp_path, what, "--max-restarts", "0") as running:
        assert running.wait(250) == 1, running.stderr
        assert text in running.stderr
        assert not [event for event in running.events() if event["event"] == "device_fault"]
