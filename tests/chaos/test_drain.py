"""Ranks that are told to go: they finish their step, leave without one that is aborted, and do not come back."""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from elasticgang.protocol import stop_request
from elasticgang.protocol.agent_lifecycle import END_S, LEAVE_S
from tests.chaos.test_kills import NUM_STEPS, Fault, alone, at, check, histories, run, soon
from tests.chaos.training_scripts import script, training
from tests.support import Job, is_alive

__all__ = ["alone"]  # the fixture


def together(place: str, *ranks: int, **conditions: int) -> list[Fault]:
    return [soon(place, rank, "drain", free=True, **conditions) for rank in ranks]


def seen_off(faults: list[Fault]) -> list[Fault]:
    """The job does not end before those who go have."""
    stays = min({0, 1, 2, 3} - {fault["rank"] for fault in faults})
    return [*faults, soon("body", stays, "see-off", free=True, step=NUM_STEPS - 2)]


def check_all_went(job: Job, went: set[int], *, killed: tuple[int, ...] = ()) -> None:
    """Those and no others have left, with exit code 0; only who was killed has been started again."""
    exits = defaultdict(list)
    for event in job.events():
        if event["event"] == "exited":
            exits[event["local_rank"]].append(event["status"])
    for rank in range(4):
        assert exits[rank] == [-9] * killed.count(rank) + [0], f"rank {rank}"
    finished = [history for history in histories(job.directory) if history and history[-1]["kind"] == "finished"]
    assert len(finished) == 4 - len(went)


def lost_tries(job: Job) -> list[int]:
    """Steps that somebody had prepared in more than one generation."""
    tries = defaultdict(set)
    for history in histories(job.directory):
        for line in history:
            if line["kind"] == "prepared":
                tries[line["step"]].add(line["generation"])
    return [step for step, generations in tries.items() if len(generations) > 1]


# Faults, who goes, and who is killed besides.
SCENARIOS: dict[str, tuple[list[Fault], set[int], tuple[int, ...]]] = {
    "one after the other": (
        [
            at("body", 1, "drain", step=3),
            at("commit_recorded", 0, "leave", step=7),  # its vote is over: the next one tells
            at("step", 3, "drain", step=11),
        ],
        {0, 1, 3},
        (),
    ),
    "two at once": (together("body", 0, 2, step=4), {0, 2}, ()),
    "before there is anything to leave": (
        [soon("start", 1, "drain"), soon("joined", 3, "drain", free=True)],
        {1, 3},
        (),
    ),
    "while the first generation is agreed": ([soon("requested", 2, "drain")], {2}, ()),
    "during a generation change": (
        [at("body", 1, step=3), soon("requested", 2, "drain"), at("body", 1, step=9), soon("configuring", 0, "drain")],
        {0, 2},
        (1, 1),
    ),
    "a learner": ([at("body", 1, step=3), soon("healing", 1, "drain")], {1}, (1,)),
    "one that builds": ([at("body", 1, step=3), soon("joined", 1, "drain")], {1}, (1,)),
}
UNDISTURBED = ("one after the other", "two at once")


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Job]]]:
    """The jobs of all scenarios that were selected, two at a time."""
    selected = [
        str(item.callspec.params["name"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_who_goes_takes_nothing_along
    ]
    with ThreadPoolExecutor(2) as pool:
        directories = {name: tmp_path_factory.mktemp("job") for name in selected}
        yield {name: pool.submit(run, directories[name], seen_off(SCENARIOS[name][0]), 4) for name in selected}
        pool.shutdown(cancel_futures=True)


# MANAGER-10
@pytest.mark.parametrize("name", SCENARIOS)
def test_who_goes_takes_nothing_along(name: str, jobs: dict[str, Future[Job]], alone: str) -> None:
    job = jobs[name].result()
    faults, went, killed = SCENARIOS[name]
    check(job, seen_off(faults), alone)
    check_all_went(job, went, killed=killed)
    if name in UNDISTURBED:
        assert lost_tries(job) == []
        generations = [event for event in job.events() if event["event"] == "generation"]
        assert len(generations) == 1 + len({fault["step"] for fault in faults})


def test_in_the_last_step_it_is_too_late(tmp_path: Path, alone: str) -> None:
    faults = [soon("body", 1, "drain", step=NUM_STEPS - 1)]
    job = run(tmp_path, faults)
    check(job, faults, alone)
    assert len([event for event in job.events() if event["event"] == "generation"]) == 1
    assert {event["status"] for event in job.events() if event["event"] == "exited"} == {0}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_that_has_done_all_steps_and_leaves_is_not_interrupted(ranks: int, tmp_path: Path) -> None:
    """Nor is what follows its loop: the job is over for all, whoever was to go."""
    setup = """
        from elasticgang import testing
        testing.fail_at("leaving", lambda: os.kill(os.getpid(), signal.SIGTERM))
    """
    after = '(here / f"after-{rank}").write_text(f"{manager.committed_steps}\\n")'
    with Job(tmp_path, training(tmp_path, setup=setup, after=after), ranks=ranks) as job:
        assert job.wait() == 0, job.stderr
        assert {event["status"] for event in job.events() if event["event"] == "exited"} == {0}
    assert [(tmp_path / f"after-{rank}").read_text() for rank in range(ranks)] == ["5\n"] * ranks


def test_when_all_go_the_job_ends_and_says_so(tmp_path: Path) -> None:
    faults = together("body", 0, 1, 2, step=4)
    job = run(tmp_path, faults)
    assert job.process.returncode == 1
    assert "elasticgang: error: all ranks have left; the last committed step is" in job.stderr


def test_the_job_succeeds_if_all_ranks_called_leave(tmp_path: Path) -> None:
    job = run(tmp_path, [soon("body", rank, "leave", free=True, step=4) for rank in range(3)])
    assert job.process.returncode == 0, job.stderr
    assert f"elasticgang: all ranks have left: 5 of {NUM_STEPS} steps are committed\n" in job.stderr
    assert {event["status"] for event in job.events() if event["event"] == "exited"} == {0}


def test_one_whose_script_ends_early_is_named(tmp_path: Path) -> None:
    body = """
                if step.index == 5 and rank == 1:
                    sys.exit(0)
                while step.index == 20 and not (here / "told").exists(): time.sleep(0.005)
    """
    early = "rank 1 exited with code 0 before its loop had ended"
    with Job(tmp_path, training(tmp_path, steps=40, body=body), ranks=3) as job:
        # Nobody is told of an exit that is complete only after the job has finished.
        job.expect_line(f"{early}: not restarting it")
        (tmp_path / "told").touch()
        assert job.wait() == 0, job.stderr
    assert job.stderr.count(f"elasticgang: {early}: not restarting it") == 1
    (cause,) = [event["cause"] for event in job.events() if event.get("cause") and event["generation"] == 2]
    assert cause in (early, "rank 1 left before the last step")  # the others agree before it is gone, or after


def test_one_that_joins_and_never_comes_to_its_loop_is_named(tmp_path: Path) -> None:
    path = training(tmp_path, setup="sys.exit(0) if rank == 1 else None")
    with Job(tmp_path, path, ranks=2) as job:
        assert job.wait() == 0, job.stderr
    named = "elasticgang: rank 1 exited with code 0 before its loop had ended: not restarting it\n"
    assert job.stderr.count(named) == 1


def test_when_all_break_out_of_the_loop_nobody_is_said_to_have_lost_a_step(tmp_path: Path) -> None:
    body = """
                if step.index == 5:
                    optim.step(weight=slots.num_samples)
                    break
    """
    after = """
        (here / f"out-{rank}").touch()
        while not all((here / f"out-{other}").exists() for other in range(3)): time.sleep(0.001)
    """
    with Job(tmp_path, training(tmp_path, steps=40, body=body, after=after), ranks=3) as job:
        assert job.wait() == 0, job.stderr
    assert job.stderr.count("before its loop had ended: not restarting it\n") == 3


def test_the_only_one_with_state_goes_once_another_has_it(tmp_path: Path, alone: str) -> None:
    faults = [at("body", 1, step=3), soon("serving", 0, "drain")]
    job = run(tmp_path, faults, ranks=2)
    check(job, faults, alone)
    assert [event["status"] for event in job.events() if event["event"] == "exited" and event["local_rank"] == 0] == [0]


def test_the_only_one_with_state_stays_for_one_that_waits_to_join(tmp_path: Path, alone: str) -> None:
    """Alone in its generation, it is told to go when it has heard that somebody comes back."""
    is_alone = soon("step", 0, "busy", alone=True, free=True)
    faults = [at("body", 1, step=3), soon("start", 1, "await-next"), is_alone, soon("body", 0, "drain", alone=True)]
    job = run(tmp_path, faults, ranks=2)
    check(job, faults, alone)
    assert [event["status"] for event in job.events() if event["event"] == "exited"] == [-9, 0, 0]
    assert job.stderr.count(STAYS) == 1


STAYS = "this rank is to go, but stays until another has healed the state that it alone holds"

# Whoever takes the place of a rank 1 that died takes its time to build.
SLOW = """
        if rank == 1 and (here / "first").exists():
            (here / "builds").write_text("1\\n")
            while not (here / "go").exists(): time.sleep(0.005)
        if rank == 1: (here / "first").touch()
"""


UNHURRIED = """
                if not (here / "go").exists(): time.sleep(0.005)
"""


def lose_and_tell_to_go(job: Job) -> None:
    """Rank 1 dies, and rank 0 is told to go while it is started again."""
    job.expect("entered", local_rank=1)
    os.kill(job.rank_pid(1), signal.SIGKILL)
    job.expect("spawned", local_rank=1, count=2)
    job.expect("generation", generation=2)
    os.kill(job.rank_pid(0), signal.SIGTERM)
    job.expect_line(STAYS)


def test_the_only_one_with_state_stays_for_one_that_is_started_again(tmp_path: Path) -> None:
    after = '(here / f"after-{rank}").write_text(f"{manager.committed_steps}\\n")'
    body = """
                def is_early():  # the other one may be there in step 110 already
                    if step.index == 100:
                        return not manager.leave_requested
                    return step.index == 110 and manager.num_members == 1 and not manager.join_noticed
                while rank == 0 and not manager.poisoned and is_early(): time.sleep(0.005)
    """
    path = training(tmp_path, steps=200, setup=SLOW, body=body, after=after)
    with Job(tmp_path, path, ranks=2) as job:
        lose_and_tell_to_go(job)
        (tmp_path / "go").touch()
        assert job.expect("exited", local_rank=0)["status"] == 0
        assert job.wait() == 0, job.stderr
    assert (tmp_path / "after-1").read_text() == "200\n"
    assert job.stderr.count(STAYS) == 1


def test_a_spare_follows_the_only_one_with_state(tmp_path: Path) -> None:
    after = '(here / f"after-{rank}").write_text(f"{manager.committed_steps}\\n")'
    body = """
                while step.index == 100 and not (manager.leave_requested or (here / "go").exists()): time.sleep(0.005)
    """
    path = training(tmp_path, steps=200, body=body, after=after)
    with Job(tmp_path, path, ranks=1, options=("--spares", "1")) as job:
        (spare,) = {0, 1} - {job.expect("entered")["local_rank"]}
        job.expect("spare", local_rank=spare)
        os.kill(job.rank_pid(1 - spare), signal.SIGTERM)
        assert job.expect("exited", local_rank=1 - spare)["status"] == 0
        (tmp_path / "go").touch()
        assert job.wait() == 0, job.stderr
        assert (tmp_path / f"after-{spare}").read_text() == "200\n"
        assert f"rank {1 - spare} drains, and a spare may replace it" in job.stderr
        assert not [event for event in job.events() if event["event"] == "warned"]


def test_last_holder_leaves_when_no_successor_can_start(tmp_path: Path) -> None:
    """The only other rank is told to go while it is started again."""
    with Job(tmp_path, training(tmp_path, steps=30_000, setup=SLOW, body=UNHURRIED), ranks=2) as job:
        lose_and_tell_to_go(job)
        job.expect_file(tmp_path / "builds")  # from there on it heeds the signal
        os.kill(job.rank_pid(1), signal.SIGTERM)
        assert job.expect("exited", local_rank=0)["status"] == 0
        assert job.wait() == 1
    assert "elasticgang: error: all ranks have left; the last committed step is" in job.stderr


def test_what_follows_the_loop_is_for_those_who_stay_and_for_those_who_left_of_themselves(tmp_path: Path) -> None:
    body = """
                if step.index == 5 and rank == 1:
                    manager.leave()
                while rank == 0 and step.index == 20 and not (here / "told").exists():
                    time.sleep(0.005)
    """
    after = """
        (here / f"after-{rank}").write_text(f"{manager.committed_steps}\\n")
    """
    path = training(tmp_path, steps=40, body=body, after=after)
    with Job(tmp_path, path, ranks=3) as job:
        job.expect("exited", local_rank=1, status=0)
        assert (tmp_path / "after-1").read_text() == "6\n"
        os.kill(job.rank_pid(2), signal.SIGTERM)
        (tmp_path / "told").touch()
        job.expect("exited", local_rank=2, status=0)
        assert not (tmp_path / "after-2").exists()
        assert job.wait() == 0
        assert (tmp_path / "after-0").read_text() == "40\n"
    assert "Traceback" not in job.stderr


def test_a_second_signal_does_not_wait_for_the_step(tmp_path: Path) -> None:
    body = f"""
                if rank == 1 and step.index == 3:
                    pathlib.Path({str(tmp_path)!r}, "busy").write_text("1\\n")
                    while not manager.leave_requested: time.sleep(0.01)
                    pathlib.Path({str(tmp_path)!r}, "heeded").write_text("1\\n")
                    time.sleep(50)
                if rank == 0 and step.index < 200: time.sleep(0.01)
    """
    with Job(tmp_path, training(tmp_path, steps=50, body=body), ranks=3) as job:
        job.expect_file(tmp_path / "busy")
        pid = job.rank_pid(1)
        os.kill(pid, signal.SIGTERM)
        job.expect_file(tmp_path / "heeded")
        os.kill(pid, signal.SIGTERM)  # as from whoever ends all processes (REPEAT-1)
        time.sleep(stop_request.REPEATED_S)
        assert is_alive(pid)
        os.kill(pid, signal.SIGTERM)
        job.expect("exited", local_rank=1, status=-signal.SIGTERM)
        assert job.wait() == 0
        assert len([event for event in job.events() if event["event"] == "spawned"]) == 3


def test_a_ranks_own_children_end_by_sigterm_as_ever(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        f"""\
        import os, pathlib, signal, time
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, b"x")
            time.sleep(60)
            os._exit(0)
        os.read(reader, 1)
        os.kill(child, signal.SIGTERM)
        pathlib.Path({str(tmp_path)!r}, "status").write_text(f"{{os.waitpid(child, 0)[1]}}\\n")
        """,
    )
    with Job(tmp_path, path, ranks=1) as job:
        assert job.expect_file(tmp_path / "status") == f"{signal.SIGTERM}\n"
        assert job.wait() == 0


# DRAIN-2
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_child_that_gets_a_signal_as_it_is_forked_ends_and_its_rank_is_restarted_later(
    tmp_path: Path, number: signal.Signals
) -> None:
    """As the workers of a pool that is left at once."""
    body = """if rank == 1 and step.index == 2 and not (here / "statuses").exists():
                    statuses = set()
                    for _ in range(10):
                        if (child := os.fork()) == 0:
                            time.sleep(10)
                            os._exit(1)
                        os.kill(child, NUMBER)
                        statuses.add(os.waitpid(child, 0)[1])
                    (here / "statuses").write_text(f"{statuses}\\n")
                    os.kill(os.getpid(), signal.SIGKILL)""".replace("NUMBER", str(int(number)))
    with Job(tmp_path, training(tmp_path, steps=100_000, body=body), options=["--hang-timeout", "150"]) as job:
        assert job.expect_file(tmp_path / "statuses") == f"{{{number}}}\n"
        job.expect("spawned", local_rank=1, count=2)


def test_the_end_of_the_job_is_no_drain(tmp_path: Path) -> None:
    """SIGINT to the agent ends the ranks where they are."""
    body = 'time.sleep(0.05); (here / f"at-{rank}").write_text("1\\n")'
    options = ["--grace-period", "60"]  # a rank that is slow to die is not killed
    with Job(tmp_path, training(tmp_path, steps=100_000, body=body), ranks=2, options=options) as job:
        job.expect_file(tmp_path / "at-0")
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 128 + signal.SIGINT
        assert {e["status"] for e in job.events() if e["event"] == "exited"} == {-signal.SIGINT}


# LIFE-5
def test_sigterm_lets_the_ranks_of_the_only_agent_finish_their_step(tmp_path: Path) -> None:
    """It may take longer than what ends at once has."""
    body = f'(here / f"at-{{rank}}").write_text("1\\n"); time.sleep({END_S + 0.5})'
    with Job(tmp_path, training(tmp_path, steps=100_000, body=body), ranks=2) as job:
        job.expect_file(tmp_path / "at-0")
        job.process.terminate()
        assert job.wait() == 128 + signal.SIGTERM
        told = f"elasticgang: SIGTERM: the ranks leave at a step boundary, within {LEAVE_S:g} s (--grace-period)"
        assert job.stderr.splitlines().count(told) == 1
        assert "all ranks have left; the last committed step is" in job.stderr
        assert {e["status"] for e in job.events() if e["event"] == "exited"} == {0}
