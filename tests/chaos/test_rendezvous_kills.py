"""An agent or the coordinator is killed while rendezvous keys are on their way between agents: the groups of the new
generation are half made."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticgang.comm.worker import EAGER_SIZE
from elasticgang.environment import ASK_SIZE
from tests.chaos.several import Cluster, generation_of
from tests.exhaustive import exhaustive
from tests.support import Job, kill

LARGE = EAGER_SIZE + 2  # the ranks of such a group ask for the keys of some others here (KEYS-ASKED)

pytestmark = pytest.mark.timeout(600)


def killed_at(place: str, armed: Path) -> list[str]:
    return ["-m", "tests.chaos.killed_command", place, str(armed)]


def has(job: Job, event: str, **fields: object) -> bool:
    return any(seen["event"] == event and fields.items() <= seen.items() for seen in job.events())


@pytest.mark.parametrize("generation", [1, 2])
def test_an_agent_is_killed_before_it_has_sent_its_keys(tmp_path: Path, alone: str, generation: int) -> None:
    """The ranks of the others wait for keys that do not come."""
    armed = tmp_path / "armed"
    if generation == 1:
        armed.touch()
    with Cluster(tmp_path, holds=[5]) as cluster:
        first = cluster.start(nnodes="3:3", ranks=1)
        second = cluster.start(nnodes="3:3", ranks=2)
        victim = cluster.start(nnodes="3:3", ranks=1, program=killed_at("keys_collected", armed))
        if generation == 2:
            cluster.reached(5, 4)
            armed.touch()
            kill(second.rank_pid(1))
        assert victim.wait() == -9
        victim.assert_nothing_left()
        cluster.agents.remove(victim)
        names = {agent.expect("started")["agent"] for agent in (first, second)}  # the victim may have written none
        for agent in (first, second):
            generation_of(agent, generation + 1)
            assert not has(agent, "entered", generation=generation)
            assert agent.expect("host lost")["agent"] not in names
        cluster.release(5)
        cluster.check(alone, [first, second])


@pytest.mark.parametrize(
    ("generation", "state", "ranks"),
    [(1, False, 2), (2, True, 2), pytest.param(2, False, LARGE // 2, marks=exhaustive)],
)
def test_the_coordinator_is_killed_before_it_has_forwarded_keys(
    tmp_path: Path, alone: str, generation: int, state: bool, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generation begins with the keys that agents send again, or ask for again, and no other one is needed."""
    monkeypatch.setenv(ASK_SIZE, str(EAGER_SIZE))
    connects = 2 * ranks <= EAGER_SIZE  # as it is entered; ranks of a larger one connect in the first step
    armed = tmp_path / "armed"
    if generation == 1:
        armed.touch()
    with Cluster(tmp_path, holds=[5], state=state, program=killed_at("keys_received", armed)) as cluster:
        agents = [cluster.start(nnodes="2:2", ranks=ranks) for _ in range(2)]
        if generation == 2:
            cluster.reached(5, 2 * ranks)
            armed.touch()
            kill(agents[0].rank_pid(0))
        assert cluster.coordinator.wait() == -9
        assert not connects or not any(has(agent, "entered", generation=generation) for agent in agents)
        cluster.restart_coordinator()
        for agent in agents:
            agent.expect("entered", generation=generation)
            assert not has(agent, "generation", generation=generation + 1)
        cluster.release(5)
        for agent in agents:
            change = agent.expect("generation_change", generation=generation)
            assert change["phases_ms"]["first_commit"] is not None
        cluster.check(alone, agents)
