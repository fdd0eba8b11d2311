"""A job whose coordinator and agents are each process 1 of a container: made of the kernel's namespaces, without an
engine. `test_docker.py` has the same with one."""

from __future__ import annotations

import functools
import signal
from pathlib import Path

import psutil
import pytest

from tests.chaos.network import Network
from tests.chaos.several import Cluster, generation_of, kill_agent
from tests.support import Job, is_alive, wait_until

pytestmark = pytest.mark.timeout(600)


def start(cluster: Cluster, network: Network, host: str, *options: str) -> Job:
    return cluster.start(nnodes="2:9", options=options, prefix=network.contained(host))


def is_back(cluster: Cluster, step: int, other: Job, before: int) -> bool:
    """Both ranks of `other`, which wait in `step`, know that ranks wait to join, or these are in a generation of four
    after `before`."""
    generations = [event for event in other.events() if event["event"] == "generation"]
    seats = [event["ranks"] for event in generations if event["generation"] > before]
    return [0, 0, 1, 1] in seats or len(list(cluster.notes.glob(f"join-{step}-*"))) == 2


def of_all(agent: Job) -> int:
    """The newest generation, once its event is written and it has four ranks; 0 before."""
    newest = [event for event in agent.events() if event["event"] == "generation"][-1:]
    return sum(event["generation"] for event in newest if event["ranks"] == [0, 0, 1, 1])


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
def test_a_container_comes_back_at_another_address(tmp_path: Path, alone: str) -> None:
    """As podman gives it one when it is connected again: first before its lease ends, then after."""
    with (
        Network(["c", "a", "b"]) as network,
        Cluster(tmp_path, holds=[5, 12, 18], host=network.addresses["c"], prefix=network.contained("c")) as cluster,
    ):
        first, second = start(cluster, network, "a"), start(cluster, network, "b")
        for num_moved, (step, is_fenced) in enumerate([(5, False), (12, True)], 1):
            cluster.reached(step, 4)
            before = wait_until(functools.partial(of_all, first), "the generation of all four ranks")
            num_lost = len([event for event in first.events() if event["event"] == "host lost"])
            network.cut("b")
            if is_fenced:
                second.expect("fenced", count=num_moved)
                first.expect("host lost", count=num_lost + 1)
            network.move("b")  # before its agent notices, otherwise: what is left of the lease then is hardly enough
            network.reconnect("b")
            second.expect("coordinator unreachable", count=num_moved)
            fenced = second.expect("fenced", count=num_moved)
            assert ("no longer has the address" in fenced["reason"]) == (not is_fenced)
            assert second.expect("started", count=num_moved + 1)["host"] == network.addresses["b"]
            if is_fenced:  # else its new ranks may be there before the others have left their generation
                assert generation_of(first, before + 1)["ranks"] == [0, 1]
            wait_until(functools.partial(is_back, cluster, step, first, before), "the new ranks")
            cluster.release(step)
        cluster.reached(18, 4)
        cluster.release(18)
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
        (agent,) = psutil.Process(second.process.pid).children()
        agent.send_signal(signal.SIGTERM)
        cluster.leave_requested(5, 2)
        cluster.release(5)
        wait_until(lambda: not is_alive(agent.pid), "the end of the container")
        cluster.check(alone, [first])
        second.assert_nothing_left()
        assert generation_of(first, 2)["ranks"] == [0, 1]
        assert not [event for event in first.events() if event["event"] == "generation_change" and event["in_doubt"]]
