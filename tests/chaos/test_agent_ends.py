"""One of several agents is ended from outside: what that costs the others, and what they say of it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.several import Cluster, generation_of, kill_agent
from tests.chaos.test_kills import histories
from tests.support import Job, kill

pytestmark = pytest.mark.timeout(600)


def statuses(job: Job) -> set[int]:
    return {event["status"] for event in job.events() if event["event"] == "exited"}


def change_to(job: Job, generation: int) -> dict[str, Any]:
    return job.expect("generation_change", generation=generation)


def id_of(job: Job) -> str:
    return str(job.expect("started")["agent"])


def events_of(job: Job, *names: str) -> list[dict[str, Any]]:
    return [event for event in job.events() if event["event"] in names]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_agent_that_gets_sigterm_lets_its_ranks_go_in_order(
    tmp_path: Path, alone: str, number: signal.Signals
) -> None:
    """As `docker stop` and Kubernetes send it, and as SIGHUP counts (STOP-HUP)."""
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("SIGHUP is ignored here, as under `nohup`")
    with Cluster(tmp_path, holds=[5, 12]) as cluster:
        first = cluster.start(nnodes="2:9")
        second = cluster.start(nnodes="2:9", ranks=1, options=["--grace-period", "60"])
        cluster.reached(5, 3)
        second.process.send_signal(number)
        cluster.leave_requested(5, 1)
        cluster.release(5)
        assert second.wait() == 128 + signal.SIGTERM, second.stderr
        second.assert_nothing_left()
        first.expect("host left", agent=id_of(second))
        cluster.release(12)
        cluster.check(alone, [first])
        assert statuses(second) == {0}
        prepared = {
            (line["step"], line["generation"])
            for history in histories(cluster.output)
            for line in history
            if line["kind"] == "prepared"
        }
        assert len(prepared) == len({step for step, _ in prepared}), "a step was tried again"
        # it says goodbye before or after the record without its ranks
        assert change_to(first, 2)["kind"] in ("left", "elsewhere")
        assert not events_of(first, "host lost")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_others_do_not_wait_for_an_agent_that_ends_in_the_midst_of_a_step(
    tmp_path: Path, alone: str, number: signal.Signals
) -> None:
    with Cluster(tmp_path, holds=[5, 12]) as cluster:
        first = cluster.start(nnodes="2:9")
        second = cluster.start(nnodes="2:9", ranks=1, options=["--grace-period", "0.2"])
        cluster.reached(5, 3)
        second.process.send_signal(number)
        assert second.wait() == 128 + number, second.stderr
        second.assert_nothing_left()
        cluster.release(5)
        cluster.release(12)
        cluster.check(alone, [first])
        change = change_to(first, 2)
        assert change["cause"].startswith(f"agent {id_of(second)} exits on {number.name}")
        assert events_of(first, "host left"), "the coordinator had to find that the process is gone"
        assert not events_of(first, "host lost")


def test_a_rank_that_dies_elsewhere_is_named_with_its_agent(tmp_path: Path, alone: str) -> None:
    """There is a rank of its number here too."""
    with Cluster(tmp_path, holds=[5, 12]) as cluster:
        first, second = cluster.start(nnodes="2:2"), cluster.start(nnodes="2:2", ranks=1)
        cluster.reached(5, 3)
        kill(second.rank_pid(0))
        generation_of(first, 2)  # before its ranks go on, and notice the loss by themselves
        cluster.release(5)
        cluster.reached(12, 2)
        cluster.release(12)
        cluster.check(alone, [first, second])
        who = f"rank 0 of agent {id_of(second)}"  # whether its agent sees the beginning of the exit or the end first
        assert change_to(first, 2)["cause"] in (f"{who} died", f"{who} was killed by SIGKILL")
        assert change_to(second, 2)["cause"] == "rank 0 was killed by SIGKILL"


def test_an_agent_that_was_killed_is_named(tmp_path: Path, alone: str) -> None:
    with Cluster(tmp_path, holds=[12]) as cluster:
        first, second = cluster.start(nnodes="2:9"), cluster.start(nnodes="2:9", ranks=1)
        cluster.reached(12, 3)
        kill_agent(second)
        cluster.release(12)
        cluster.check(alone, [first])
        assert change_to(first, 2)["cause"] == f"agent {id_of(second)} is lost"
