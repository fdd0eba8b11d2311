"""A simulated host does what the real agent does."""

from __future__ import annotations

from elasticgang.layout import ParallelLayout
from elasticgang.simulation.cluster import Cluster, Setting


def run(cluster: Cluster, *moves: str) -> None:
    for move in moves:
        name, _, verb = move.partition(" ")
        cluster.perform((name, verb))


def test_what_is_known_of_other_agents_ends_with_the_agents_id() -> None:
    cluster = Cluster(Setting(ParallelLayout(), (2, 1), num_spares=1))
    host = cluster.hosts["b"]
    run(cluster, "clock passes 2", "a0 requests", "a1 requests", "b0 requests")
    run(cluster, "a0 is received", "a1 is received", "b0 is received", "clock passes 2")
    assert host.successors.any(host.clock_s(cluster))
    run(cluster, "b freezes", "clock passes 12", "b thaws", "clock passes 1", "b0 is reaped")
    assert host.is_fenced
    run(cluster, "b rejoins")
    assert not host.successors.any(host.clock_s(cluster))
