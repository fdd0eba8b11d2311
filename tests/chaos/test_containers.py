"""A job whose coordinator and agents are each process 1 of a container: made of the kernel's namespaces, without an
engine. `test_docker.py` has the same with one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.chaos.network import Network
from tests.chaos.several import Cluster, generation_of, kill_agent
from tests.support import Job, is_alive, wait_until

pytestmark = pytest.mark.timeout(600)


def start(cluster: Cluster, network: Network, host: str, *options: str) -> Job:
    return cluster.start(nnodes="2:9", options=options, prefix=network.contained(host))


def test_containers_are_killed_cut_off_and_come_back(tmp_path: Path, alone: str) -> None:
    with (
        Network(["c", "a", "b"]) as network,
        Cluster(tmp_path, holds=[5, 12, 18], host=network.addresses["c"], prefix=network.contained("c")) as cluster,
    ):
        first, second = start(cluster, network, "a"), start(cluster, network, "b")
        cluster.reached(5, 4)
        assert [event["pid"] for event in second.events() if event["event"] == "started"] == [1]
        kill_agent(second)
        assert generation_of(first, 2)["ranks"] == [0, 1]
        cluster.release(5)
        cluster.reached(12, 2)
        back = start(cluster, network, "b")
        cluster.join_noticed(12, 2)
        cluster.release(12)
        cluster.reached(18, 4)
        network.cut("b")
        back.expect("fenced")
        first.expect("host lost")
        assert generation_of(first, 4)["ranks"] == [0, 1]
        network.reconnect("b")
        cluster.join_noticed(18, 2)
        cluster.release(18)
        cluster.check(alone, [first, back])
        assert generation_of(first, 5)["ranks"] == [0, 0, 1, 1]


# CONTROL-6
@pytest.mark.parametrize("is_fenced", [False, True])
def test_a_container_comes_back_at_another_address(tmp_path: Path, alone: str, is_fenced: bool) -> None:
    """As podman gives it one when it is connected again: before its lease ends, or after."""
    with (
        Network(["c", "a", "b"]) as network,
        Cluster(tmp_path, holds=[5, 12], host=network.addresses["c"], prefix=network.contained("c")) as cluster,
    ):
        first, second = start(cluster, network, "a"), start(cluster, network, "b")
        cluster.reached(5, 4)
        network.cut("b")
        if is_fenced:
            second.expect("fenced")
            first.expect("host lost")
        network.move("b")  # before its agent notices, otherwise: what is left of the lease then is hardly enough
        network.reconnect("b")
        second.expect("coordinator unreachable")
        assert ("no longer has the address" in second.expect("fenced")["reason"]) == (not is_fenced)
        assert second.expect("started", count=2)["host"] == network.addresses["b"]
        assert generation_of(first, 2)["ranks"] == [0, 1]
        cluster.join_noticed(5, 2)
        cluster.release(5)
        cluster.reached(12, 4)
        cluster.release(12)
        cluster.check(alone, [first, second])
        assert not [event for event in second.events() if event["event"] == "restart"]


def test_a_container_that_is_stopped_leaves_in_order(tmp_path: Path, alone: str) -> None:
    """`docker stop` sends SIGTERM to process 1, for which no signal has a default action."""
    with (
        Network(["c", "a", "b"]) as network,
        Cluster(tmp_path, holds=[5], host=network.addresses["c"], prefix=network.contained("c")) as cluster,
    ):
        first, second = start(cluster, network, "a"), start(cluster, network, "b", "--grace-period", "60")
        cluster.reached(5, 4)
        (agent,) = [process for process in second.processes() if process.parent().pid == second.process.pid]  # type: ignore[union-attr]
        agent.send_signal(signal.SIGTERM)
        cluster.leave_requested(5, 2)
        cluster.release(5)
        wait_until(lambda: not is_alive(agent.pid), "the end of the container")
        cluster.check(alone, [first])
        second.assert_nothing_left()
        assert generation_of(first, 2)["ranks"] == [0, 1]
        assert not [event for event in first.events() if event["event"] == "generation_change" and event["in_doubt"]]
