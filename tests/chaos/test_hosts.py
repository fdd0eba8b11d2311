"""Hosts that are cut off, in real network namespaces: they end their members before others hold them to be lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticgang.protocol.coordinator_messages import JOB_TIMEOUTS
from tests.chaos.network import Network
from tests.chaos.several import Cluster, generation_of
from tests.support import Job, kill, wait_until

pytestmark = pytest.mark.timeout(600)

LOADED_S = 6.0  # that a loaded machine may take longer


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(["c", "a", "b"]) as made:
        yield made


def cluster_on(network: Network, directory: Path, holds: list[int]) -> Cluster:
    return Cluster(directory, holds=holds, host=network.addresses["c"], prefix=network.on("c"))


def agent_ids(job: Job) -> list[str]:
    return [event["agent"] for event in job.events() if event["event"] == "started"]


def is_back(cluster: Cluster, step: int, agent: Job) -> bool:
    """The agent's only rank was restarted: those in `step` know that it waits to join, or it has joined before."""
    num_entered = sum(event["event"] == "entered" for event in agent.events())
    return num_entered > 1 or any(cluster.notes.glob(f"join-{step}-*"))


def test_a_cut_off_host_ends_its_members_and_comes_back_with_new_ones(
    tmp_path: Path, alone: str, network: Network
) -> None:
    with cluster_on(network, tmp_path, [5, 12]) as cluster:
        first = cluster.start(nnodes="2:9", prefix=network.on("a"))
        second = cluster.start(nnodes="2:9", prefix=network.on("b"))
        cluster.reached(5, 4)
        network.cut("b")
        cut_at = time.monotonic()
        second.expect("fenced")
        ended = [second.expect("exited", count=count)["monotonic"] for count in (1, 2)]
        assert max(ended) - cut_at < JOB_TIMEOUTS.lease_s + LOADED_S
        assert "was killed by" not in second.stderr  # one line told of all its ranks
        lost = first.expect("host lost")
        assert lost["agent"] == agent_ids(second)[0]
        assert max(ended) < lost["t"] < cut_at + JOB_TIMEOUTS.lost_after_s + LOADED_S
        assert generation_of(first, 2)["ranks"] == [0, 1]
        cluster.release(5)
        cluster.reached(12, 2)
        network.reconnect("b")
        second.expect("started", count=2)
        cluster.join_noticed(12, 2)
        cluster.release(12)
        cluster.check(alone, [first, second])
        assert len(set(agent_ids(second))) == 2
        assert generation_of(second, 3)["ranks"] == [0, 0, 1, 1]
        (change,) = [event for event in second.events() if event["event"] == "generation_change"][1:]
        assert (change["cause"], change["kind"]) == ("this host lost its connection to the coordinator", "agent_lost")


def test_a_short_cut_ends_nothing(tmp_path: Path, alone: str, network: Network) -> None:
    with cluster_on(network, tmp_path, [5]) as cluster:
        agents = [cluster.start(nnodes="2:9", ranks=1, prefix=network.on(host)) for host in "ab"]
        cluster.reached(5, 2)
        network.cut("b")
        cluster.release(5)
        time.sleep(1.0)
        network.reconnect("b")
        cluster.check(alone, agents)
        assert not [event for agent in agents for event in agent.events() if event["event"] in ("fenced", "host lost")]


@pytest.mark.parametrize("group", ["isolated-gloo", "gloo"])
def test_hosts_that_have_only_ipv6_lose_a_rank_and_heal_it_from_the_other_host(
    tmp_path: Path, alone: str, group: str
) -> None:
    with Network(["c", "a", "b"], has_ipv6=True) as network, cluster_on(network, tmp_path, [5, 12]) as cluster:
        assert cluster.coordinator.address.startswith("[fd77::1]:")
        options = ["--process-group", group]
        agents = [cluster.start(nnodes="2:2", ranks=1, options=options, prefix=network.on(host)) for host in "ab"]
        cluster.reached(5, 2)
        second = agents[1]
        kill(second.rank_pid(0))
        cluster.release(5)
        cluster.reached(12, 1)
        wait_until(lambda: is_back(cluster, 12, second), "the rank that was killed")
        cluster.release(12)
        cluster.check(alone, agents)
        second.expect("healed", count=2)  # it began as a learner


def test_gloo_in_process_connects_hosts_whose_name_has_another_address(
    tmp_path: Path, alone: str, network: Network
) -> None:
    """The namespaces have the name of this machine, which is none of their addresses."""
    with cluster_on(network, tmp_path, []) as cluster:
        options = ["--process-group", "gloo"]
        agents = [cluster.start(nnodes="2:2", ranks=1, options=options, prefix=network.on(host)) for host in "ab"]
        cluster.check(alone, agents)


def test_when_all_of_the_job_is_cut_off_nobody_starts_it_over(tmp_path: Path, network: Network) -> None:
    """Not until its members have ended; and then its state is gone with them."""
    with cluster_on(network, tmp_path, [5]) as cluster:
        members = cluster.start(prefix=network.on("b"))
        cluster.reached(5, 2)
        network.cut("b")
        cut_at = time.monotonic()
        newcomer = cluster.start(prefix=network.on("a"))
        ended = [members.expect("exited", count=count)["monotonic"] for count in (1, 2)]
        assert max(ended) - cut_at < JOB_TIMEOUTS.lease_s + LOADED_S
        assert newcomer.wait() == 1
        assert "the job's state is lost" in newcomer.stderr
        assert not any(event["event"] == "generation" for event in newcomer.events())
        (failed,) = [event for event in newcomer.events() if event["event"] == "failed"]
        assert failed["t"] > max(ended)
        network.reconnect("b")
        assert members.wait() == 1
        assert "the job's state is lost" in members.stderr
        members.assert_nothing_left()
