"""Hosts that reach the coordinator, but not each other, in real network namespaces: the job goes on without some."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.network import Network
from tests.chaos.several import Cluster
from tests.support import Job, kill

pytestmark = pytest.mark.timeout(600)

OPTIONS = ["--collective-timeout", "2"]


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(["c", "a", "b", "d"]) as made:
        yield made


def cluster_on(network: Network, directory: Path, holds: list[int]) -> Cluster:
    return Cluster(directory, holds=holds, host=network.addresses["c"], prefix=network.on("c"))


def start(cluster: Cluster, network: Network, host: str, nnodes: str = "3:3", **options: Any) -> Job:
    return cluster.start(nnodes=nnodes, ranks=1, options=OPTIONS, prefix=network.on(host), **options)


def is_spare(agent: Job) -> bool:
    """In the newest generation that it knows."""
    newest = [event for event in agent.events() if event["event"] == "generation"][-1]
    (own,) = [seats for seats in newest["seats"] if seats["agent"] == agent.expect("started")["agent"]]
    return bool([status for _, _, status in own["seats"]] == ["spare"])


# REACH-1, NEXT-10, CUT-1, REACHED
def test_a_host_that_reaches_only_the_coordinator_is_left_out_and_comes_back(
    tmp_path: Path, alone: str, network: Network
) -> None:
    with cluster_on(network, tmp_path, [5, 12, 20]) as cluster:
        agents = [start(cluster, network, host) for host in "abd"]
        cluster.reached(5, 3)
        left_out = agents[2]
        for other in "ab":
            network.drop("d", other)
        cluster.release(5)
        cluster.reached(12, 2)
        own, others = network.addresses["d"], [network.addresses[host] for host in "ab"]
        for agent in agents[:2]:
            agent.expect_line(f"this host does not reach {own} (no answer within 2.5 s)")
        assert is_spare(left_out)
        reason = left_out.expect("spare")["reason"]
        assert reason == f"this host and {', '.join(others)} do not reach each other"
        told = agents[0].expect("generation", generation=2)["seats"]
        assert [host["out_of_reach"] for host in told if "out_of_reach" in host] == [others]
        for other in "ab":
            network.pass_on("d", other)
        cluster.join_noticed(12, 2)
        cluster.release(12)
        cluster.reached(20, 3)
        assert not is_spare(left_out)
        cluster.release(20)
        cluster.check(alone, agents)


# WORKER-9, MANAGER-17
def test_ranks_that_all_wait_for_a_connection_say_so_at_the_time_limit(
    tmp_path: Path, alone: str, network: Network
) -> None:
    with cluster_on(network, tmp_path, [5, 12]) as cluster:
        agents = [start(cluster, network, host) for host in "abd"]
        cluster.reached(5, 3)
        for host, other in ("ad", "da", "bd", "db"):
            network.drop(host, other)
        kill(agents[0].rank_pid(0))  # the next generation begins at once, without a collective that times out
        for agent in agents[1:]:
            agent.expect_line(
                "did not connect in the last generation; rank 0 requests the next one in 1 s (configure timed out "
                "after 2 seconds: wait timeout: a rank did not connect, although its keys have come)"
            )
        cluster.release(5)
        cluster.reached(12, 2)
        assert is_spare(agents[2])
        cluster.release(12)
        cluster.check(alone, agents)


# NEXT-10, OVER
def test_of_two_hosts_one_goes_on_to_the_end_and_the_other_takes_no_step_again(
    tmp_path: Path, alone: str, network: Network
) -> None:
    with cluster_on(network, tmp_path, [5]) as cluster:
        agents = [start(cluster, network, host, "2:2") for host in "ab"]
        cluster.reached(5, 2)
        network.drop("a", "b")  # in one direction
        cluster.release(5)
        codes = [agent.wait() for agent in agents]
        assert codes == [0, 0]
        assert len([agent for agent in agents if is_spare(agent)]) == 1
        for agent in agents:
            assert [e["generation"] for e in agent.events() if e["event"] == "generation"] == [1, 2]


# CUT-2, MANAGER-17
def test_hosts_that_a_job_needs_are_named_at_once_and_go_on_once_they_reach_each_other(
    tmp_path: Path, alone: str, network: Network
) -> None:
    with cluster_on(network, tmp_path, [5]) as cluster:
        agents = [start(cluster, network, host, "2:2", layout={"min_replicas": 2}) for host in "ab"]
        cluster.reached(5, 2)
        network.drop("a", "b")
        cluster.release(5)
        own, other = network.addresses["a"], network.addresses["b"]
        agents[0].expect_line(f"this host does not reach {other} (no answer within 2.5 s)")
        agents[0].expect_line(f"the ranks of {own} and {other} did not connect in the last generation; rank 0 requests")
        agents[0].expect_line(", 2 times in a row: rank 0 stopped while it connected to the other ranks")
        network.pass_on("a", "b")
        cluster.check(alone, agents)


# REACH-1
def test_a_joiner_whose_packets_come_back_is_left_out_after_its_first_generation(
    tmp_path: Path, alone: str, network: Network
) -> None:
    with cluster_on(network, tmp_path, [5, 12]) as cluster:
        agents = [start(cluster, network, host, "2:3") for host in "ab"]
        cluster.reached(5, 2)
        for other in "ab":
            network.refuse("d", other)
        joiner = start(cluster, network, "d", "2:3")
        cluster.join_noticed(5, 2)
        cluster.release(5)
        cluster.reached(12, 2)
        others = [f"{network.addresses[host]} (No route to host)" for host in "ab"]
        joiner.expect_line(f"this host does not reach {', '.join(others)}")
        joiner.expect("spare")
        numbers = [event["generation"] for event in agents[0].events() if event["event"] == "generation"]
        assert numbers[-1] <= 4
        cluster.release(12)
        cluster.check(alone, agents)
        assert joiner.wait() == 0


# TRY-1
def test_a_host_to_which_large_packets_are_lost_is_left_out(tmp_path: Path, alone: str, network: Network) -> None:
    with cluster_on(network, tmp_path, [5, 12]) as cluster:
        agents = [start(cluster, network, host) for host in "abd"]
        cluster.reached(5, 3)
        for other in "ab":
            network.lose_large_packets(other, "d")
        cluster.release(5)
        cluster.reached(12, 2)
        names = [f"{network.addresses[host]} (large packets from there are lost)" for host in "ab"]
        agents[2].expect_line(f"this host does not reach {', '.join(names)}")
        assert is_spare(agents[2])
        cluster.release(12)
        cluster.check(alone, agents)
