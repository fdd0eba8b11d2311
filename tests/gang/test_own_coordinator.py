"""A job's own coordinator that does not come up."""

from __future__ import annotations

import os
from typing import Any

import pytest

from elasticgang.comm.forkserver import ForkServer, Spawned
from elasticgang.errors import OperationalError
from elasticgang.quorum import owned
from elasticgang.quorum.owned import OwnCoordinator
from tests.support import is_alive, wait_until


class StandsStill(ForkServer):
    """What it starts says nothing, keeps its end of the pipe, and cannot be ended but by SIGKILL."""

    pid: int

    def spawn(self, target: str, args: dict[str, Any], **options: Any) -> Spawned:
        spawned = super().spawn("tests.gang.children:sleep", args, **options)
        self.pid = spawned.pid
        return spawned


@pytest.mark.timeout(60)
def test_one_that_stands_still_while_it_starts_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned, "_START_TIMEOUT_S", 0.2, raising=False)
    server = StandsStill(preload=())
    own = OwnCoordinator()
    try:
        server.wait_ready()
        with pytest.raises(OperationalError, match=r"the coordinator did not start within 0.2 s"):
            own.start(server, "agent", None)
        wait_until(lambda: not is_alive(server.pid), "its end")
        os.waitpid(server.pid, 0)
    finally:
        own.close()
        server.close()
