"""Data workers that die or hang in a job: an event and a log line for each, counted alike wherever the job is shown."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from elasticgang.train.data import GlobalBatch
from tests.chaos.test_status import read, status, urls
from tests.chaos.training_scripts import script
from tests.support import Job, wait_until

NUM_STEPS = 12
TIMEOUT_S = 20.0  # of a collective; a worker may need half of it
SCRIPT = """\
    import os, pathlib, signal, time
    import torch
    import elasticgang as eg

    here = pathlib.Path({here!r})


    class Data:
        def __len__(self):
            return 64

        def __getitem__(self, index):
            for fault, number in (("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)):
                path = here / f"{{fault}}-{{index}}"
                if path.exists():
                    path.unlink()
                    os.kill(os.getpid(), number)
            with (here / "fetched").open("a") as file:
                file.write(f"{{index}} {{os.getpid()}}\\n")
            return torch.full((2,), float(index))


    manager = eg.join()
    model = eg.DistributedDataParallel(manager, torch.nn.Linear(2, 1))
    optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.0))
    batches = eg.GlobalBatch(64, size=4, slot=2, seed=1)
    loader = eg.DataLoader(Data(), batches, num_workers=1)
    manager.register_state(model=model, optim=optim)
    for step in manager.steps({steps}):
        while step.index == {steps} - 1 and not (here / "go").exists():
            step.check()
            time.sleep(0.01)
        with step:
            slots = loader.slots(step)
            for slot, batch in slots:
                with model.accumulate(last=slot.last):
                    model(batch).sum().backward()
            if optim.step(weight=slots.num_samples) and step.index == {steps} - 2:
                (here / f"last-but-one-{{os.environ['LOCAL_RANK']}}").touch()
"""


# DATAWORKER-6
def test_lost_data_workers_are_events_and_end_no_generation(tmp_path: Path) -> None:
    batches = GlobalBatch(64, size=4, slot=2, seed=1)
    killed, stopped = int(batches.samples(3)[0]), int(batches.samples(6)[3])  # of rank 0, and of rank 1
    for fault, index in (("kill", killed), ("stop", stopped)):
        (tmp_path / f"{fault}-{index}").touch()
    path = script(tmp_path, SCRIPT.format(here=str(tmp_path), steps=NUM_STEPS))
    options = ["--collective-timeout", str(TIMEOUT_S), "--status-port", "0", "--metrics-port", "0"]
    with Job(tmp_path, path, ranks=2, options=[*options, "--job-id", f"job-{tmp_path.name}"]) as job:
        at_url = urls(job)
        wait_until(lambda: len(list(tmp_path.glob("last-but-one-*"))) == 2, "the last but one step")
        for kind in ("died", "hung"):  # the agent may be later than the ranks
            job.expect("data_worker_lost", kind=kind)
        losses = [event for event in job.events() if event["event"] == "data_worker_lost"]
        found = json.loads(status(tmp_path / "status", str(tmp_path), "--json")[1])
        text = status(tmp_path / "text", str(tmp_path))[1]
        shown = wait_until(lambda: _page(at_url["page"], found["elapsed_s"]), "the page of that step")
        metrics = read(at_url["metrics"])
        (tmp_path / "go").touch()
        assert job.wait() == 0, job.stderr
        stderr, generations = job.stderr, [event for event in job.events() if event["event"] == "generation"]
    assert {(loss["kind"], loss["local_rank"], loss["step"]) for loss in losses} == {("died", 0, 3), ("hung", 1, 6)}
    (hung,) = [loss for loss in losses if loss["kind"] == "hung"]
    assert hung["reason"] == f"has not answered for {TIMEOUT_S / 2:g} s"
    assert len(generations) == 1, "the other rank has waited"
    assert len(re.findall(r"data worker 0 \(process \d+\) has .*: replacing it", stderr)) == len(losses)
    expected = {"died": 1, "hung": 1, "failed": 0}
    assert found["data_workers_lost"] == shown["data_workers_lost"] == expected
    assert "data workers of this agent's ranks that were lost, and replaced: 1 died, 1 hung" in text
    samples = [sample for family in text_string_to_metric_families(metrics) for sample in family.samples]
    name = "elasticgang_data_workers_lost_total"
    assert {each.labels["kind"]: each.value for each in samples if each.name == name} == expected


def _page(url: str, after_s: float) -> dict[str, object] | None:
    found: dict[str, object] = json.loads(read(url + "status.json"))["status"]
    elapsed_s = found["elapsed_s"]
    assert isinstance(elapsed_s, float)
    return found if elapsed_s > after_s else None
