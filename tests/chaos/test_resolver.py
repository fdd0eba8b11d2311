"""A resolver that does not answer: torch's store client, in comm processes, asks it for the name of each address."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import Job

SILENT = "127.0.0.77"
SCRIPT = """
import os, elasticgang as eg, torch
manager = eg.join()
model = torch.nn.Linear(1, 1)
ddp, optim = eg.DistributedDataParallel(manager, model), eg.Optimizer(manager, torch.optim.SGD(model.parameters()))
manager.register_state(model=model, optim=optim)
for step in manager.steps(2):
    with step:
        with ddp.accumulate(last=True):
            ddp(torch.ones(1, 1)).sum().backward()
        optim.step(weight=1)
print("lookups:", repr(os.environ.get("RES_OPTIONS")), flush=True)
"""


@pytest.fixture
def beside_it(tmp_path: Path) -> Iterator[list[str]]:
    """What runs a command on a machine whose resolver is one that says nothing."""
    conf = tmp_path / "resolv.conf"
    conf.write_text(f"nameserver {SILENT}\n")
    prefix = ["unshare", "-m", "sh", "-c", f'mount --bind {conf} /etc/resolv.conf && exec "$@"', "sh"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        try:
            silent.bind((SILENT, 53))
            subprocess.run([*prefix, "true"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as exc:
            pytest.skip(f"no resolver of our own is to be had here: {exc}")
        yield prefix


def test_a_silent_resolver_keeps_no_agent_from_its_job(
    tmp_path: Path, beside_it: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the resolver's own limits, each connection would take as long as an agent waits for its coordinator."""
    monkeypatch.delenv("RES_OPTIONS", raising=False)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with Job(tmp_path, script, ranks=2, prefix=beside_it) as job:
        assert job.wait() == 0, job.stderr
        assert job.stdout.count("lookups: None") == 2  # the script has what the user has set
