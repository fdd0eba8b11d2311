"""Hosts that reach the coordinator, but not each other, in real network namespaces: the job goes on without some."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.network import Network
from tests.chaos.several import Cluster
from tests.support import Job

pytestmark = pytest.mark.timeout(600)

OPTIONS = ["--collective-timeout", "2"]


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(["c", "a", "b", "d"]) as made:
        yield made


def cluster_on(network: Network, directory: Path, holds: list[int]) -> Cluster:
    return Cluster(directory, holds=holds, host=network.addresses["c"], prefix=network.on("c"))


def start(cluster: Cluster, network: Network, host: str) -> Job:
    return cluster.start(nnodes="3:3", ranks=1, options=OPTIONS, prefix=network.on(host))


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
        for other in "ab":
            network.pass_on("d", other)
        cluster.join_noticed(12, 2)
        cluster.release(12)
        cluster.reached(20, 3)
        assert not is_spare(left_out)
        cluster.release(20)
        cluster.check(alone, agents)
