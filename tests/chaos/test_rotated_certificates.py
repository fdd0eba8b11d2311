"""Certificates are replaced while a job runs, as cert-manager and SPIRE do it: new ones of a new CA, which alone counts
then, after the old ones have expired. What connects anew afterwards does so with the new files, and no step is lost."""

from __future__ import annotations

import json
import socket
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from tests.chaos.several import Cluster, Coordinator
from tests.chaos.test_kills import JOB, NUM_STEPS, check_samples, histories
from tests.integration.certificates import Authority, Files, Mounted
from tests.support import PROMPT_S, Job, kill, wait_until

pytestmark = pytest.mark.timeout(600)

SHORT_S = 25  # for all processes to take them into use; a guard, as files that have expired are not taken


def expect_log(coordinator: Coordinator, text: str, count: int) -> None:
    wait_until(lambda: coordinator.stderr.count(text) >= count, f"{count} times {text!r}")


def renew(mounted: Mounted, files: Files, coordinator: Coordinator, agents: list[Job], count: int) -> None:
    """For the `count`-th time."""
    mounted.swap(files)
    expect_log(coordinator, "the TLS files have changed, and new connections use them", count)
    for agent in agents:
        agent.expect("tls_renewed", count=count)


def await_return(output: Path) -> None:
    """Until the restarted rank is in step 9, or waits for its end to join."""
    wait_until(lambda: len([*output.glob("at-9-*")]) > 1 or [*output.glob("join-9-*")], "the restarted rank")


def await_rank(job: Job, local_rank: int, files: Files) -> None:
    """Until it serves its state with the new files: a rank looks at them by itself, up to a second after its agent."""
    context = files.read().client_context(checks_name=False)

    def has_renewed() -> bool:
        for found in psutil.Process(job.rank_pid(local_rank)).net_connections("tcp"):
            if found.status == psutil.CONN_LISTEN:
                try:
                    with socket.create_connection(found.laddr, PROMPT_S) as sock, context.wrap_socket(sock):
                        return True
                except OSError:  # an SSLError: the other CA has signed its certificate
                    pass
        return False

    wait_until(has_renewed, f"the new files in use by rank {local_rank}")


def has_healed(job: Job) -> bool:
    """A rank of it, after the first generation."""
    return any(event["event"] == "healed" and event["generation"] > 1 for event in job.events())


# TLS-NEWEST, TLS-ENDS
def test_a_job_of_several_agents_outlives_its_certificates(tmp_path: Path, alone: str) -> None:
    first, second = Authority(tmp_path, "first"), Authority(tmp_path, "second")
    mounted = Mounted(tmp_path / "mounted", first.issue())
    with Cluster(tmp_path / "job", holds=[4, 9, 14], state=True, credentials=mounted.files.options) as cluster:
        agents = [cluster.start(nnodes="2:9", ranks=1) for _ in range(2)]
        cluster.reached(4, 2)
        short = first.issue(begins_in=timedelta(hours=-1), ends_in=timedelta(seconds=SHORT_S))
        renew(mounted, short, cluster.coordinator, agents, 1)
        expect_log(cluster.coordinator, f"coordinator: the certificate {mounted.files.cert} expires in", 1)
        for agent in agents:
            agent.expect_line(f"the certificate {mounted.files.cert} expires in")
        expect_log(cluster.coordinator, f"coordinator: the certificate {mounted.files.cert} has expired", 1)
        for agent in agents:
            agent.expect_line(f"the certificate {mounted.files.cert} has expired")
            agent.expect("warned", count=2)
        renew(mounted, second.issue(), cluster.coordinator, agents, 2)

        kill(cluster.coordinator.process.pid)
        for agent in agents:
            agent.expect("coordinator unreachable")
        kill(agents[0].rank_pid(0))  # the next generation needs a session, and its heal a connection between ranks
        cluster.restart_coordinator()
        for agent in agents:
            agent.expect("coordinator reachable")
        cluster.release(4)
        await_return(cluster.output)
        cluster.release(9)
        cluster.reached(14, 2)
        joiner = cluster.start(ranks=1)
        cluster.join_noticed(14, 2)
        cluster.release(14)
        cluster.check(alone, [*agents, joiner])
        for agent in agents:
            told = [event["text"] for event in agent.events() if event["event"] == "warned"]
            assert len([text for text in told if "the certificate" in text]) == 2
        assert has_healed(agents[0])
        assert has_healed(joiner)


# TLS-NEWEST
def test_a_jobs_own_coordinator_and_its_ranks_use_the_new_files(tmp_path: Path, alone: str) -> None:
    first, second = Authority(tmp_path, "first"), Authority(tmp_path, "second")
    mounted = Mounted(tmp_path / "mounted", first.issue())
    output = tmp_path / "output"
    output.mkdir()
    arguments = ["--output-dir", str(output), "--steps", str(NUM_STEPS), "--holds", json.dumps([5, 9])]
    with Job(tmp_path / "job", JOB, *arguments, ranks=2, options=mounted.files.options) as job:
        wait_until(lambda: len(list(output.glob("at-5-*"))) == 2, "step 5")
        mounted.swap(second.issue())
        job.expect("tls_renewed")
        await_rank(job, 0, mounted.files)
        job.coordinator().kill()
        job.expect("coordinator reachable")
        kill(job.rank_pid(1))  # its successor heals from the rank that has had the former files
        (output / "go-5").touch()
        await_return(output)
        (output / "go-9").touch()
        assert job.wait() == 0, job.stderr
        job.assert_nothing_left()
        assert has_healed(job)
    found = histories(output)
    assert {line["digest"] for history in found for line in history if line["kind"] == "finished"} == {alone}
    check_samples(found)
