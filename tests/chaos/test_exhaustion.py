"""A host on which nothing more can be had for a while: descriptors, processes and threads, here."""

from __future__ import annotations

import contextlib
import resource
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elasticgang.checkpoint import listing
from elasticgang.checkpoint.locations import storage_at
from scripts.chaos_runs.soaking.comm_processes import comm_processes
from tests.chaos.several import Coordinator
from tests.chaos.training_scripts import training
from tests.exhaustive import exhaustive
from tests.support import Job, kill, wait_until

BODY = 'time.sleep(0.01); (here / f"at-{rank}").write_text(f"{step.index}\\n")'

PIDS_ROOTS = (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup"))  # of version 1 and 2


def allow_descriptors(pid: int, limit: int) -> int:
    """The former limit."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, hard))
    return soft


@contextlib.contextmanager
def no_further_threads(job: Job) -> Iterator[None]:
    """Where a container's limit of processes is reached. Skips the test where this user may make no control group."""
    top = next((root for root in PIDS_ROOTS if (root / "cgroup.procs").exists()), None)
    group = (top or PIDS_ROOTS[0]) / f"eg-test-{uuid.uuid4().hex}"
    try:
        group.mkdir()
        (group / "pids.max").write_text("1")
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        for process in job.processes():
            with contextlib.suppress(ProcessLookupError):
                (group / "cgroup.procs").write_text(str(process.pid))
        yield
    finally:
        (group / "pids.max").write_text("max")
        wait_until(lambda: not _leave(group), "the end of its processes")
        group.rmdir()


def _leave(group: Path) -> list[str]:
    """Move the processes out of the group, and return which: one may have forked another meanwhile."""
    pids = (group / "cgroup.procs").read_text().split()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            (group.parent / "cgroup.procs").write_text(pid)
    return pids


# DOOR-4
def test_a_rank_that_cannot_be_started_comes_back_once_it_can(tmp_path: Path) -> None:
    with Job(tmp_path, training(tmp_path, steps=100_000, body=BODY), ranks=2) as job:
        job.expect_file(tmp_path / "at-1")
        former = allow_descriptors(job.process.pid, 3)  # those that it has, it keeps
        kill(job.rank_pid(1))
        job.expect("warned", count=2)
        job.expect("generation", generation=2)
        step = int(job.expect_file(tmp_path / "at-0"))
        wait_until(lambda: int(job.expect_file(tmp_path / "at-0")) > step + 3, "further steps")
        allow_descriptors(job.process.pid, former)
        job.expect("entered", local_rank=1, count=2)
        told = [line for line in job.stderr.splitlines() if "rank 1 could not be started" in line]
        assert told[0].endswith("trying again in 1 s: [Errno 24] Too many open files")
        assert len(told) == len([event for event in job.events() if event["event"] == "warned"])
        assert "Traceback" not in job.stderr
        job.process.terminate()
        assert job.wait() == 143


def test_connections_that_no_descriptor_is_left_for_fill_no_log(tmp_path: Path) -> None:
    with Job(tmp_path, training(tmp_path, steps=100_000, body=BODY), ranks=2) as job:
        job.expect_file(tmp_path / "at-1")
        found = psutil.Process(job.process.pid).net_connections()
        (port,) = [each.laddr.port for each in found if each.status == psutil.CONN_LISTEN]
        former = allow_descriptors(job.process.pid, 3)
        with socket.create_connection(("127.0.0.1", port)) as waiting:
            job.expect("accept failed")
            allow_descriptors(job.process.pid, former)
            assert waiting.recv(1)  # the agent has accepted it
        assert len([event for event in job.events() if event["event"] == "accept failed"]) == 1
        job.process.terminate()
        assert job.wait() == 143


def test_the_coordinator_is_started_again_once_it_can_be(tmp_path: Path) -> None:
    with Job(tmp_path, training(tmp_path, steps=100_000, body=BODY), ranks=2) as job:
        job.expect_file(tmp_path / "at-1")
        former = allow_descriptors(job.process.pid, 3)
        kill(job.coordinator().pid)
        job.expect_line("elasticgang: the coordinator could not be started; trying again: [Errno 24]")
        allow_descriptors(job.process.pid, former)
        job.expect("coordinator reachable")
        kill(job.rank_pid(1))
        job.expect("entered", local_rank=1, count=2)
        job.process.terminate()
        assert job.wait() == 143


def test_the_end_of_the_job_needs_nothing_more(tmp_path: Path) -> None:
    setup = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"  # so that there is somebody left to be ended
    path = training(tmp_path, steps=100_000, setup=setup, body=BODY)
    with Job(tmp_path, path, ranks=2, options=["--grace-period=0.1"]) as job:
        job.expect_file(tmp_path / "at-1")
        allow_descriptors(job.process.pid, 3)
        job.process.terminate()
        assert job.wait() == 143
        job.assert_nothing_left()
        assert "Traceback" not in job.stderr


# SAVER-2 FETCH-13
def test_ranks_without_threads_for_saves_and_heals_train_on(tmp_path: Path) -> None:
    """As where a container's limit of processes is reached."""
    body = """
                import threading
                threading.stack_size(1 << 47 if step.index < 4 else 0)  # more than there is
                """
    setup = "manager.checkpoints(every_steps=2)"
    path = training(tmp_path, steps=6, setup=setup, body=body)
    with Job(tmp_path, path, ranks=2, options=["--checkpoint-dir", str(tmp_path / "checkpoints")]) as job:
        assert job.wait() == 0, job.stderr
        told = [line for line in job.stderr.splitlines() if "is not saved" in line]
        assert told
        assert all(line.endswith(": can't start new thread") for line in told)
    assert next(listing.scan(storage_at(tmp_path / "checkpoints"))).attempt.step == 6


@pytest.mark.parametrize("code", [0, 143])
def test_the_end_of_the_job_needs_no_further_thread(tmp_path: Path, code: int) -> None:
    body = f'{BODY}\n                while not (here / "go").exists(): time.sleep(0.01)'
    with Job(tmp_path, training(tmp_path, steps=1 if code == 0 else 100_000, body=body), ranks=2) as job:
        for rank in range(2):
            job.expect_file(tmp_path / f"at-{rank}")
        with no_further_threads(job):
            if code:
                job.process.terminate()
            (tmp_path / "go").touch()
            assert job.wait() == code, job.stderr
            job.assert_nothing_left()
        assert "Traceback" not in job.stderr


def test_ranks_that_die_together_while_there_is_no_further_thread_come_back(tmp_path: Path) -> None:
    with Job(tmp_path, training(tmp_path, steps=100_000, body=BODY), ranks=5) as job:
        for rank in range(5):  # which have healed then
            wait_until(lambda at=tmp_path / f"at-{rank}": int(job.expect_file(at)) > 3, "all ranks")  # type: ignore[misc]
        with no_further_threads(job):
            for pid in [job.rank_pid(rank) for rank in range(1, 5)]:
                kill(pid)
            job.expect("warned", count=4)
        for rank in range(1, 5):
            job.expect("entered", local_rank=rank, count=2)
        job.process.terminate()
        assert job.wait() == 143
        assert "Traceback" not in job.stderr


# RENDEZVOUS-4
@pytest.mark.parametrize("without", [[0, 1], pytest.param([0], marks=exhaustive)])
def test_ranks_that_get_no_comm_process_wait_for_one(tmp_path: Path, without: list[int]) -> None:
    """A rank that has one does not wait for the others until its time limit."""
    with Job(tmp_path, training(tmp_path, steps=100_000, body=BODY), ranks=3) as job:
        for rank in range(3):  # which have healed then
            wait_until(lambda at=tmp_path / f"at-{rank}": int(job.expect_file(at)) > 3, "all ranks")  # type: ignore[misc]
        with no_further_threads(job):
            kill(job.rank_pid(2))
            job.expect("generation", generation=2)
            for pid in {pid for rank in without for pid in comm_processes(job.rank_pid(rank))}:
                kill(pid)
            job.expect_line("has no comm process, and tries again: ")
        job.expect("entered", local_rank=2, count=2)
        assert "timed out" not in job.stderr
        step = int(job.expect_file(tmp_path / "at-0"))
        wait_until(lambda: int(job.expect_file(tmp_path / "at-0")) > step + 3, "further steps")
        assert {seen["local_rank"] for seen in job.events() if seen["event"] == "exited"} == {2}
        assert job.stderr.count("rank 0 has no comm process, and tries again") <= 1
        job.process.terminate()
        assert job.wait() == 143
        assert "Traceback" not in job.stderr


# RENDEZVOUS-4
@pytest.mark.parametrize("passes", [True, False])
def test_a_host_that_joins_waits_for_a_comm_process_but_not_for_long(tmp_path: Path, passes: bool) -> None:
    setup = """
        import threading; from elasticgang.member import rendezvous; rendezvous.MAX_WITHOUT_FIRST_COMM = 3
        from scripts.chaos_runs.soaking.comm_processes import comm_processes
        if "LACKS" in os.environ:
            def end_lack():
                while not (here / "go").exists(): time.sleep(0.01)
                threading.stack_size(0)
            threading.Thread(target=end_lack, daemon=True).start()
            while not (found := comm_processes(os.getpid())): time.sleep(0.01)
            threading.stack_size(1 << 47)  # more than there is
            for pid in found: os.kill(pid, signal.SIGKILL)
        """
    path = training(tmp_path, steps=100_000, setup=setup, body="time.sleep(0.01)")
    with Coordinator(tmp_path / "coordinator") as coordinator:
        options = ["--coordinator", coordinator.address, "--nnodes", "1:2", "--job-id", "job"]
        with Job(tmp_path / "one", path, ranks=1, options=options) as one:
            one.expect("entered")
            with Job(tmp_path / "two", path, ranks=1, options=options, env={"LACKS": "1"}) as two:
                two.expect_line("rank 0 has no comm process, and tries again: ")
                if passes:
                    (tmp_path / "go").touch()
                    two.expect("entered")
                    two.process.terminate()
                assert two.wait() == (143 if passes else 1)
                assert two.stderr.count("Traceback") == (not passes)
                one.expect("generation_change", cause=f"rank 0 of agent {agent_of(two)} has no comm process")
                assert "firewall" not in one.stderr + two.stderr
            one.process.terminate()
            assert one.wait() == 143
            assert "Traceback" not in one.stderr


# MANAGER-17
def test_a_rank_that_restarts_meanwhile_on_another_host_does_not_give_up(tmp_path: Path) -> None:
    setup = """
        import threading
        from scripts.chaos_runs.soaking.comm_processes import comm_processes
        def lack():
            while not (here / "lack").exists(): time.sleep(0.01)
            threading.stack_size(1 << 47)  # more than there is
            for pid in comm_processes(os.getpid()): os.kill(pid, signal.SIGKILL)
            while not (here / "go").exists(): time.sleep(0.01)
            threading.stack_size(0)
        host = os.environ["HOST"]
        if host == "two": threading.Thread(target=lack, daemon=True).start()
        """
    path = training(tmp_path, steps=100_000, setup=setup, body=BODY.replace("at-{rank}", "at-{host}-{rank}"))
    fewer = "from elasticgang.protocol import member_lifecycle; member_lifecycle.MAX_NOT_ENTERED = 3"
    path.write_text(path.read_text().replace("manager = eg.join()", f"{fewer}; manager = eg.join()"))
    with Coordinator(tmp_path / "coordinator") as coordinator:
        options = ["--coordinator", coordinator.address, "--nnodes", "2", "--job-id", "job"]
        with (
            Job(tmp_path / "one", path, ranks=2, options=options, env={"HOST": "one"}) as one,
            Job(tmp_path / "two", path, ranks=1, options=options, env={"HOST": "two"}) as two,
        ):
            for name in ("at-one-0", "at-one-1", "at-two-0"):  # they have healed then
                wait_until(lambda at=tmp_path / name: int(one.expect_file(at)) > 3, "all ranks")  # type: ignore[misc]
            (tmp_path / "lack").touch()
            two.expect_line("rank 0 has no comm process, and tries again: ")
            kill(one.rank_pid(1))
            one.expect("spawned", local_rank=1, count=2)
            one.expect_line("generations in a row; rank 1 requests the next one")
            (tmp_path / "go").touch()
            one.expect("entered", local_rank=1, count=2)
            assert {seen["status"] for seen in one.events() if seen["event"] == "exited"} == {-9}
            for job in (one, two):
                job.process.terminate()
            assert [job.wait() for job in (one, two)] == [143, 143]
            assert "Traceback" not in one.stderr + two.stderr


def agent_of(job: Job) -> str:
    return str(job.expect("started")["agent"])


# RENDEZVOUS-4
def test_a_rank_that_lacks_its_own_threads_ends_itself(tmp_path: Path) -> None:
    """Otherwise all ranks would give up in the same generation, and the job with them."""
    body = f"""{BODY}
                if rank == 1 and step.index >= 3 and not (here / "limited").exists():
                    (here / "limited").touch()
                    threading.stack_size(1 << 47)  # more than there is
                """
    setup = "import threading; from elasticgang.member import rendezvous; rendezvous.MAX_WITHOUT_COMM = 3"
    with Job(tmp_path, training(tmp_path, steps=100_000, setup=setup, body=body), ranks=2) as job:
        wait_until((tmp_path / "limited").exists, "the limit")
        for pid in comm_processes(job.rank_pid(1)):
            kill(pid)
        job.expect_line("ends itself: ")
        job.expect("entered", local_rank=1, count=2)
        step = int(job.expect_file(tmp_path / "at-0"))
        wait_until(lambda: int(job.expect_file(tmp_path / "at-0")) > step + 3, "further steps")
        assert {seen["local_rank"] for seen in job.events() if seen["event"] == "exited"} == {1}
        job.process.terminate()
        assert job.wait() == 143


# GROUP-2 GROUP-3
def test_a_rank_that_is_killed_for_memory_has_a_line_and_comes_back(tmp_path: Path) -> None:
    root = Path("/sys/fs/cgroup/memory") if Path("/sys/fs/cgroup/memory").exists() else Path("/sys/fs/cgroup")
    group = root / f"eg-test-{uuid.uuid4().hex}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if root.name == "memory" else "memory.max")).write_text(str(800 << 20))
    except OSError as error:
        pytest.skip(f"no control group for memory can be made here: {error}")
    body = f"""{BODY}
                if rank == 1 and not (here / "took").exists():
                    (here / "took").touch()
                    taken = torch.ones(1 << 28)
                (here / f"score-{{rank}}").write_text(open("/proc/self/oom_score_adj").read())
                """
    prefix = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
    try:
        with Job(tmp_path, training(tmp_path, steps=100_000, body=body), ranks=2, prefix=prefix) as job:
            job.expect("entered", local_rank=1, count=2)
            usual = Path("/proc/self/oom_score_adj").read_text()
            for rank in range(2):
                wait_until(lambda at=tmp_path / f"score-{rank}": job.expect_file(at) == usual, "its score")  # type: ignore[misc]
            assert {seen["local_rank"] for seen in job.events() if seen["event"] == "exited"} == {1}
            job.expect_line("for want of memory the kernel has killed 1 process here (oom_kill), rank 1 maybe")
            job.process.terminate()
            assert job.wait() == 143
    finally:
        wait_until(lambda: not _leave(group), "the end of its processes")
        group.rmdir()
