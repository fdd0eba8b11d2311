"""The coordinator is killed: training goes on, and what needs it waits for its return, and no longer than allowed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
from pathlib import Path

import pytest

from elasticgang.errors import OperationalError
from elasticgang.session.credentials import Credentials
from elasticgang.session.operator_client import grant
from elasticgang.watch.reader import JobReader
from tests.chaos.several import Cluster, generation_of, kill_agent
from tests.chaos.test_kills import JOB, NUM_STEPS, check_samples, histories
from tests.exhaustive import exhaustive
from tests.support import Job, kill, wait_until

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    ("with_rank", "stands_still"), [(False, False), pytest.param(True, False, marks=exhaustive), (False, True)]
)
def test_a_jobs_own_coordinator_comes_back_on_its_address(
    tmp_path: Path, alone: str, with_rank: bool, stands_still: bool
) -> None:
    output = tmp_path / "output"
    output.mkdir()
    holds = json.dumps([5, 9])
    with Job(tmp_path, JOB, "--output-dir", str(output), "--steps", str(NUM_STEPS), "--holds", holds, ranks=3) as job:
        wait_until(lambda: len(list(output.glob("at-5-*"))) == 3, "step 5")
        former = job.coordinator()
        address = {connection.laddr for connection in former.net_connections() if connection.status == "LISTEN"}
        if stands_still:
            former.suspend()
        else:
            former.kill()
        if with_rank:
            kill(job.rank_pid(1))
        (output / "go-5").touch()
        job.expect("coordinator reachable")
        again = job.coordinator(former.pid)
        assert address & {connection.laddr for connection in again.net_connections() if connection.status == "LISTEN"}
        wait_until(lambda: len(list(output.glob("at-9-*"))) >= 2, "step 9")
        kill(job.rank_pid(0))
        (output / "go-9").touch()
        assert job.wait(90.0) == 0, job.stderr
        job.assert_nothing_left()
        # A change under way, and what was reported, are told at the end.
        others = ("generation_change", "reported")
        names = [event["event"] for event in job.events() if event["event"] not in others]
        assert names[-2:] == ["exited", "exiting"]
        generations = [event["generation"] for event in job.events() if event["event"] == "generation"]
    assert generations == list(range(1, len(generations) + 1))
    assert len(generations) >= (3 if with_rank else 2)
    found = histories(output)
    assert {line["digest"] for history in found for line in history if line["kind"] == "finished"} == {alone}
    check_samples(found)


def newest(job: Job) -> int:
    return max(int(event["generation"]) for event in job.events() if event["event"] == "generation")


def reader_of(job: Job) -> JobReader:
    return JobReader(job.directory / "events.jsonl", lambda: True, pytest.fail)


# CONTROL-1, SUMMARY-3
@pytest.mark.parametrize("state", [True, pytest.param(False, marks=exhaustive)])
def test_a_rank_that_dies_while_it_is_away_is_noticed_and_waited_with(tmp_path: Path, alone: str, state: bool) -> None:
    """The record is in the coordinator's file, or only with the agents."""
    with Cluster(tmp_path, holds=[5, 9], state=state) as cluster:
        agents = [cluster.start(nnodes="2:9") for _ in range(2)]
        cluster.reached(5, 4)
        cluster.coordinator.process.kill()
        for agent in agents:
            agent.expect("coordinator unreachable")
        asked = [len([event for event in agent.events() if event["event"] == "requested"]) for agent in agents]
        kill(agents[0].rank_pid(0))
        cluster.release(5)
        for agent, num in zip(agents, asked, strict=True):
            agent.expect("requested", count=num + 1)  # by the connections between their ranks
        readers = [reader_of(agent) for agent in agents]
        before = [reader.read() for reader in readers]
        time.sleep(1.0)  # nothing may happen
        for found, reader in zip(before, readers, strict=True):
            later = reader.read()
            assert (later["state"], later["is_changing"], later["has_ended"]) == ("running", True, True)
            assert later["lost_s"]["under_way"] > found["lost_s"]["under_way"]
            useful_s = later["elapsed_s"] - sum(later["lost_s"].values())
            rounded_s = 0.5e-3 * (len(later["lost_s"]) + 2)  # all of them are in ms, and the job is a second or two old
            expected = pytest.approx(max(0.0, useful_s) / later["elapsed_s"], abs=1e-5 + rounded_s / later["elapsed_s"])
            assert later["goodput"] == expected
            assert found["step"] >= 5
        assert all(agent.process.poll() is None for agent in agents)
        assert not list(cluster.output.glob("at-9-*"))
        cluster.restart_coordinator()
        assert generation_of(agents[0], 2)["ranks"] in ([0, 1, 1], [0, 0, 1, 1])
        cluster.reached(9, 3)
        joiner = cluster.start()
        agents[0].expect("join noticed", generation=newest(agents[0]))
        cluster.release(9)
        cluster.check(alone, [*agents, joiner])


def test_training_goes_on_without_it_and_a_joiner_that_asks_first_is_not_alone(tmp_path: Path, alone: str) -> None:
    with Cluster(tmp_path, holds=[5, 12]) as cluster:
        agents = [cluster.start(nnodes="2:9", ranks=1) for _ in range(2)]
        cluster.reached(5, 2)
        for agent in agents:
            agent.expect("generation_change", generation=1)  # it is told some time after the first commit
        cluster.coordinator.process.kill()
        for agent in agents:
            agent.expect("coordinator unreachable")
        cluster.release(5)
        cluster.reached(12, 2)
        for agent in agents:
            names = [event["event"] for event in agent.events() if event["event"] != "reported"]
            assert names[-1] == "coordinator unreachable"
        cluster.restart_coordinator()
        joiner = cluster.start(ranks=1)
        cluster.join_noticed(12, 2)
        cluster.release(12)
        cluster.check(alone, [*agents, joiner])
        (seen,) = [event for event in joiner.events() if event["event"] == "generation"][:1]
        assert seen["generation"] == 2
        assert seen["ranks"] == [0, 0, 0]


def test_for_how_long_it_was_away_before_it_is_needed_does_not_count(tmp_path: Path, alone: str) -> None:
    limit_s = 12.0
    with Cluster(tmp_path, holds=[5]) as cluster:
        options = ["--coordinator-timeout", str(limit_s)]
        agents = [cluster.start(nnodes="2:9", ranks=1, options=options) for _ in range(2)]
        cluster.reached(5, 2)
        cluster.coordinator.process.kill()
        for agent in agents:
            agent.expect("coordinator unreachable")
        time.sleep(limit_s + 0.5)
        kill(agents[0].rank_pid(0))
        cluster.restart_coordinator()
        cluster.release(5)
        cluster.check(alone, agents)


# OFFICE
def test_the_operators_word_lets_the_job_go_on_without_an_agent_that_is_gone(tmp_path: Path, alone: str) -> None:
    """Within the lease: from then on there is no state to go on from."""
    with Cluster(tmp_path, holds=[5]) as cluster:
        agents = [cluster.start(nnodes="2:9", ranks=1) for _ in range(2)]
        cluster.reached(5, 2)
        cluster.coordinator.process.kill()
        for agent in agents:
            agent.expect("coordinator unreachable")
        kill_agent(agents[1])
        cluster.restart_coordinator()
        # The agent that is back may have yet to promise.
        assert "leads it on from generation 1" in wait_until(lambda: give_word(cluster), "the word")
        assert generation_of(agents[0], 2)["ranks"] == [0]
        cluster.release(5)
        cluster.check(alone, agents[:1])


def give_word(cluster: Cluster) -> str:
    """What the coordinator does now; nothing while no agent has come back."""
    with contextlib.suppress(OperationalError):
        return asyncio.run(grant("127.0.0.1", cluster.coordinator.port, "job", Credentials(), 10.0))
    return ""


def test_when_it_stays_away_the_job_ends_with_an_error(tmp_path: Path) -> None:
    with Cluster(tmp_path, holds=[5]) as cluster:
        agents = [cluster.start(nnodes="2:9", ranks=1, options=["--coordinator-timeout", "1.5"]) for _ in range(2)]
        cluster.reached(5, 2)
        address = cluster.coordinator.address
        cluster.coordinator.process.kill()
        kill(agents[0].rank_pid(0))
        cluster.release(5)  # the other rank notices in its next collective
        for agent in agents:
            assert agent.wait() == 1
            agent.assert_nothing_left()
            assert f"error: no generation can be agreed without the coordinator at {address}" in agent.stderr
            assert "Traceback" not in agent.stderr
        lines = [line for history in histories(cluster.output) for line in history]
        assert max(line["step"] for line in lines if line["kind"] == "committed") == 4
        assert "finished" not in {line["kind"] for line in lines}


# NOTICE
def test_agents_and_the_coordinator_say_that_its_state_directory_is_lost(tmp_path: Path, alone: str) -> None:
    """Nobody but an operator knows whether that directory has a newer record. The word comes before leases end."""
    with Cluster(tmp_path, holds=[5], state=True) as cluster:
        agents = [cluster.start(nnodes="2:9") for _ in range(2)]
        cluster.reached(5, 4)
        kill(cluster.coordinator.process.pid)
        cluster.coordinator.process.wait()
        shutil.rmtree(cluster.coordinator.directory / "state")
        cluster.restart_coordinator()
        why = "the last record was decided with a state directory, which this coordinator does not have"
        for agent in agents:
            agent.expect_line(f"no generation can be agreed yet: {why} (`elasticgang grant`)")
        wait_until(lambda: f"job job: {why} (`elasticgang grant`)" in cluster.coordinator.stderr, "its line")
        told = asyncio.run(grant("127.0.0.1", cluster.coordinator.port, "job", Credentials(), 10.0))
        assert "this coordinator leads it on from generation" in told
        cluster.release(5)
        cluster.check(alone, agents)
