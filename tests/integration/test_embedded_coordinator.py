"""A job's own coordinator that does not come up."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest

from elasticgang.agent import embedded_coordinator
from elasticgang.agent.embedded_coordinator import CoordinatorLauncher
from elasticgang.errors import OperationalError
from elasticgang.process.forkserver import ForkServer, Spawned
from elasticgang.session.credentials import Credentials
from tests.chaos.training_scripts import training
from tests.support import Job, is_alive, wait_until


class StandsStill(ForkServer):
    """What it starts says nothing, keeps its end of the pipe, and cannot be ended but by SIGKILL."""

    pid: int

    def spawn(self, target: str, args: dict[str, Any], **options: Any) -> Spawned:
        spawned = super().spawn("tests.integration.children:sleep", args, **options)
        self.pid = spawned.pid
        return spawned


@pytest.mark.timeout(60)
def test_one_that_stands_still_while_it_starts_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_coordinator, "START_TIMEOUT_S", 0.2)
    server = StandsStill(preload=())
    own = CoordinatorLauncher(Credentials())
    try:
        server.wait_ready()
        with pytest.raises(OperationalError, match=r"the coordinator did not start within 0.2 s"):
            own.start(server, founds=True)
        wait_until(lambda: not is_alive(server.pid), "its end")
        os.waitpid(server.pid, 0)
    finally:
        own.close()
        server.close()


@pytest.mark.timeout(240)
def test_a_job_goes_on_while_its_coordinator_cannot_be_started_again(tmp_path: Path) -> None:
    """Somebody else listens on its port."""
    path = training(tmp_path, steps=100_000, body='time.sleep(0.01); (here / f"at-{rank}").write_text("1\\n")')
    with Job(tmp_path, path) as job:
        job.expect_file(tmp_path / "at-0")
        port = int(job.expect("started")["coordinator"].rpartition(":")[2])

        def takes_its_port() -> socket.socket | None:
            """As soon as it is dead, and before the next one does."""
            for process in job.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.name() == "eg-coordinator":
                        process.kill()
            with contextlib.suppress(OSError):
                return socket.create_server(("127.0.0.1", port))
            return None

        with wait_until(takes_its_port, "a port that is free"):
            job.expect_line("the coordinator could not be started; trying again: cannot listen on")
        job.expect("coordinator reachable")
        job.process.terminate()
        assert job.wait() == 143, job.stderr
