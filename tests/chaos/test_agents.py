"""Several agents and their coordinator: they come, die, stand still, and do not fit."""

from __future__ import annotations

import itertools
import os
import re
import signal
from pathlib import Path

import pytest

from tests.chaos.several import Cluster, generation_of, kill_agent
from tests.chaos.test_hangs import LIMIT_S
from tests.support import kill, wait_until

pytestmark = pytest.mark.timeout(600)


def test_a_killed_agent_is_gone_without_and_another_joins(tmp_path: Path, alone: str) -> None:
    with Cluster(tmp_path, holds=[5, 12]) as cluster:
        first, second = cluster.start(nnodes="2:9"), cluster.start(nnodes="2:9")
        cluster.reached(5, 4)
        kill_agent(second)
        began = generation_of(first, 2)
        first.expect("host lost")
        assert began["ranks"] == [0, 1]
        cluster.release(5)
        cluster.reached(12, 2)
        third = cluster.start()
        cluster.join_noticed(12, 2)
        cluster.release(12)
        cluster.check(alone, [first, third])
        assert generation_of(third, 3)["ranks"] == [0, 0, 1, 1]


def test_joiners_that_outnumber_the_members(tmp_path: Path, alone: str) -> None:
    with Cluster(tmp_path, holds=[3, 9]) as cluster:
        first = cluster.start(ranks=1)
        cluster.reached(3, 1)
        joiners = [cluster.start(ranks=1) for _ in range(3)]
        for joiner in joiners:
            joiner.expect("requested")
        cluster.join_noticed(3, 1)
        cluster.release(3)
        cluster.reached(9, 2)  # the first one is not alone any more
        cluster.release(9)
        cluster.check(alone, [first, *joiners])


def test_an_agent_that_stands_still_for_less_than_its_lease_is_waited_for(tmp_path: Path, alone: str) -> None:
    with Cluster(tmp_path, holds=[5, 12]) as cluster:
        first, second = cluster.start(nnodes="2:9"), cluster.start(nnodes="2:9")
        cluster.reached(5, 4)
        os.kill(second.process.pid, signal.SIGSTOP)
        asked = len([event for event in first.events() if event["event"] == "requested"])
        kill(first.rank_pid(0))
        first.expect("requested", count=asked + 1)
        assert not any(event.get("generation") == 2 for event in first.events() if event["event"] == "generation")
        os.kill(second.process.pid, signal.SIGCONT)
        assert generation_of(first, 2)["ranks"] in ([0, 1, 1], [0, 0, 1, 1])
        cluster.release(5)
        cluster.reached(12, 3)
        cluster.release(12)
        cluster.check(alone, [first, second])
        assert not any(event["event"] in ("fenced", "host lost") for event in [*first.events(), *second.events()])


def test_an_agent_that_dies_with_a_request_open_holds_nobody_up(tmp_path: Path, alone: str) -> None:
    with Cluster(tmp_path, holds=[5]) as cluster:
        first, second = cluster.start(nnodes="2:9", ranks=1), cluster.start(nnodes="2:9", ranks=1)
        cluster.reached(5, 2)
        ghost = cluster.start(ranks=2)
        second_spawned = ghost.expect("spawned", count=2)["t"]
        wait_until(  # one request or two: the first rank may request before the second is spawned
            lambda: (
                any(event["event"] == "requested" and event["t"] > second_spawned for event in ghost.events()) or None
            ),
            "a request with both ranks",
        )
        ghost.process.kill()
        cluster.release(5)
        cluster.check(alone, [first, second])


def test_an_agent_without_a_live_rank_takes_part_in_the_agreement(tmp_path: Path, alone: str) -> None:
    with Cluster(tmp_path, holds=[5, 12]) as cluster:
        first, second = cluster.start(nnodes="2:9"), cluster.start(nnodes="2:9")
        cluster.reached(5, 4)
        killed = [second.rank_pid(rank) for rank in range(2)]
        second.process.send_signal(signal.SIGSTOP)  # so that it notices both deaths at once
        for pid in killed:
            kill(pid)
        second.process.send_signal(signal.SIGCONT)
        generation_of(first, 2)
        generation_of(second, 2)  # it took part: nobody waited until it was declared lost
        after = itertools.dropwhile(lambda event: event["event"] != "exit_began", second.events())
        names = [event["event"] for event in after if event["event"] in ("requested", "spawned")]
        assert names[0] == "requested", "before it has started another rank"
        cluster.release(5)
        cluster.reached(12, 2)
        cluster.release(12)
        cluster.check(alone, [first, second])


def test_those_beyond_the_most_wait_as_spares_and_take_a_lost_hosts_place(tmp_path: Path, alone: str) -> None:
    with Cluster(tmp_path, holds=[5, 12]) as cluster:
        seated = [cluster.start(nnodes="2:2", ranks=1) for _ in range(2)]
        cluster.reached(5, 2)
        spare = cluster.start(nnodes="2:2", ranks=1)
        cluster.join_noticed(5, 2)
        cluster.release(5)
        waiting = spare.expect("generation")
        assert (waiting["active"] + waiting["learner"], waiting["spare"]) == (2, 1)
        cluster.reached(12, 2)
        kill_agent(seated[1])
        cluster.release(12)
        cluster.check(alone, [seated[0], spare])
        taken = [event for event in spare.events() if event["event"] == "entered"]
        assert taken


def test_the_first_generation_waits_for_as_many_agents_as_asked_for(tmp_path: Path, alone: str) -> None:
    with Cluster(tmp_path) as cluster:
        agents = [cluster.start(nnodes="3:4", ranks=1) for _ in range(2)]
        for agent in agents:
            agent.expect_line("2 of at least 3 agents are here")
        assert not any(event["event"] == "generation" for agent in agents for event in agent.events())
        agents.append(cluster.start(nnodes="3:4", ranks=1))
        cluster.check(alone, agents)
        assert all(generation_of(agent, 1)["ranks"] == [0, 0, 0] for agent in agents)


def test_hosts_need_not_have_as_many_ranks_each(tmp_path: Path, alone: str) -> None:
    with Cluster(tmp_path) as cluster:
        agents = [cluster.start(nnodes="2:2", ranks=ranks, layout={"min_replicas": 3}) for ranks in (1, 2)]
        cluster.check(alone, agents)
        assert generation_of(agents[0], 1)["ranks"] == [0, 0, 1]


def test_hosts_that_are_too_small_together_are_told_of_all_ranks(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        agents = [cluster.start(nnodes="2:2", ranks=ranks, layout={"min_replicas": 4}) for ranks in (1, 2)]
        for agent in agents:
            assert agent.wait() == 2
            numbers = r"needs 4 ranks .*, but the job has 3, (1 \+ 2|2 \+ 1) on its 2 hosts"
            assert re.search(numbers, agent.stderr)


OTHER_PROTOCOL = """\
import importlib.util, pathlib, re, sys
spec = importlib.util.find_spec("elasticgang.protocol.record")
source = pathlib.Path(spec.origin).read_text()
source, count = re.subn(r"^PROTOCOL = (\\d+)$", r"PROTOCOL = \\g<1>1", source, flags=re.MULTILINE)
assert count == 1
sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
exec(compile(source, spec.origin, "exec"), module.__dict__)
from elasticgang.launch.cli import main
sys.exit(main())
"""


@pytest.mark.alone
def test_a_rank_that_hangs_is_found_by_its_agent_though_only_those_of_others_wait(tmp_path: Path, alone: str) -> None:
    with Cluster(tmp_path, holds=[5, 12]) as cluster:
        options = ["--hang-timeout", f"{LIMIT_S:g}"]
        first, second = (cluster.start(nnodes="2:9", ranks=1, options=options) for _ in range(2))
        cluster.reached(5, 2)
        stopped = second.rank_pid(0)
        os.kill(stopped, signal.SIGSTOP)
        cluster.release(5)
        second.expect("hung", pid=stopped)
        second.expect("spawned", count=2)
        cluster.reached(12, 1)
        cluster.release(12)
        cluster.check(alone, [first, second])
        assert not any(event["event"] == "hung" for event in first.events())


@pytest.mark.parametrize("what", ["layout", "protocol"])
def test_who_does_not_fit_is_refused_on_both_sides_and_the_job_goes_on(tmp_path: Path, alone: str, what: str) -> None:
    with Cluster(tmp_path, holds=[5, 12]) as cluster:
        agents = [cluster.start(nnodes="2:9", ranks=1) for _ in range(2)]
        cluster.reached(5, 2)
        if what == "layout":
            mismatched_agent = cluster.start(ranks=1, layout={"min_replicas": 2})
        else:
            mismatched_agent = cluster.start(ranks=1, program=["-c", OTHER_PROTOCOL])
        assert mismatched_agent.wait() == 2
        cluster.agents.remove(mismatched_agent)
        mismatched_agent.assert_nothing_left()
        assert "error: the job refused this host: its " + what in mismatched_agent.stderr
        for agent in agents:
            agent.expect_line("refused")
            agent.expect_line(f"its {what} is")
        cluster.release(5)
        cluster.reached(12, 2)
        cluster.release(12)
        cluster.check(alone, agents)
        assert all(event["generation"] == 1 for event in agents[0].events() if event["event"] == "generation")


@pytest.mark.parametrize("what", ["number of steps", "process group"])
def test_a_joiner_with_other_settings_is_refused_and_the_job_goes_on(tmp_path: Path, alone: str, what: str) -> None:
    """NEXT-2."""
    with Cluster(tmp_path, holds=[5]) as cluster:
        first = cluster.start(ranks=1)
        cluster.reached(5, 1)
        if what == "process group":
            joiner = cluster.start(ranks=1, options=["--process-group", "gloo"])
        else:
            joiner = cluster.start(ranks=1, script_options=["--steps", "3"])
        cluster.join_noticed(5, 1)
        cluster.release(5)
        assert joiner.wait() == 2
        cluster.agents.remove(joiner)
        joiner.assert_nothing_left()
        assert f"error: the job refused this host: its {what} is" in joiner.stderr
        first.expect_line(f"its {what} is")
        cluster.check(alone, [first])


def test_two_jobs_of_one_coordinator_know_nothing_of_each_other(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        agents = [cluster.start(ranks=1, job_id=job_id, layout={"min_replicas": 1}) for job_id in ("one", "other")]
        for agent in agents:
            assert agent.wait() == 0, agent.stderr
            agent.assert_nothing_left()
            (generation,) = [event for event in agent.events() if event["event"] == "generation"]
            assert generation["ranks"] == [0]
