"""`elasticgang run` as its users meet it: what it refuses, how it fails, how it is ended, and what it prints."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

from tests.support import REPOSITORY, Command, Job, wait_until

AT_ONCE_S = 1.0  # as the issue promises for what was left by a killed agent
ENDED_S = 2.0  # and for Ctrl-C
GRACE_S = 1.0  # the default of --grace-period


def script(directory: Path, text: str) -> Path:
    path = directory / "script.py"
    path.write_text(textwrap.dedent(text))
    return path


def training(directory: Path, *, steps: int = 5, setup: str = "", body: str = "", after: str = "") -> Path:
    """A script that trains a tiny model; `body` runs in each step before `optim.step`, `after` after the last one."""
    return script(
        directory,
        f"""\
        import os, pathlib, signal, sys, time
        import torch
        from torch import nn
        import elasticgang as eg

        here, rank = pathlib.Path({str(directory)!r}), int(os.environ["LOCAL_RANK"])
        manager = eg.join()
        model = eg.DistributedDataParallel(manager, nn.Linear(2, 1))
        optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
        batches, data = eg.GlobalBatch(16, size=4, slot=2), torch.ones(16, 2)
        manager.register_state(model=model, optim=optim)
        {setup}
        for step in manager.steps({steps}):
            with step:
                slots = batches.slots(step)
                for slot in slots:
                    with model.accumulate(last=slot.last):
                        model(data[slot.index]).sum().backward()
                {body}
                optim.step(weight=slots.num_samples)
        {after}
        """,
    )


# -- what is refused


def refused(*arguments: str) -> str:
    """The one line that is printed. Nothing was imported by which anything could have been started."""
    code = (
        "import sys\n"
        "from elasticgang.launch.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "assert not {'torch', 'torchft', 'elasticgang.agent.agent', 'subprocess'} & set(sys.modules)\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, cwd=REPOSITORY
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    prefix = "elasticgang: error: "
    assert line.startswith(prefix)
    return line.removeprefix(prefix)


THIS = str(Path(__file__))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["no/such/script.py"], "there is no script at 'no/such/script.py'"),
        (["tests"], "there is no script at 'tests'"),
        (["-m", "no_such.module"], "there is no module 'no_such.module'"),
        (["--nproc-per-node", "0", THIS], "--nproc-per-node must be at least 1, but is 0 instead"),
        (["--nproc-per-node", "-3", THIS], "--nproc-per-node must be at least 1, but is -3 instead"),
        (["--spares", "-1", THIS], "--spares must be at least 0, but is -1 instead"),
        (["--max-restarts", "-1", THIS], "--max-restarts must be at least 0, but is -1 instead"),
        (
            ["--nnodes", "1:2", THIS],
            "--nnodes of more than one host needs --coordinator, at an address that all of them reach, and a --job-id",
        ),
        (
            ["--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:1", THIS],
            "--nnodes of more than one host needs a --job-id, the same on all of them",
        ),
        (["--coordinator", "nowhere", THIS], "--coordinator must be HOST:PORT, but is 'nowhere' instead"),
        (["--coordinator", "a..b:1", THIS], "--coordinator: 'a..b' is no name of a host"),
        (["--coordinator", "h:\u00b2", THIS], "--coordinator must be HOST:PORT, but is 'h:\u00b2' instead"),
        (["--job-id", "", THIS], "--job-id must be 1 to 100 bytes long, but is '' instead"),
        (["--coordinator", "a:99999", THIS], "--coordinator must be HOST:PORT, but is 'a:99999' instead"),
        (
            ["--standalone", "--coordinator", "127.0.0.1:1", THIS],
            "--standalone starts a coordinator of its own; leave out --coordinator, or --standalone",
        ),
    ],
)
def test_a_bad_command_line_is_refused_in_one_line(arguments: list[str], line: str) -> None:
    assert refused("run", *arguments) == line


def test_the_version_is_printed_without_torch() -> None:
    code = (
        "import sys\n"
        "from elasticgang.launch.cli import main\n"
        "try:\n"
        "    main(['--version'])\n"
        "finally:\n"
        "    assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert (done.returncode, done.stdout) == (0, f"elasticgang {version('elasticgang')}\n"), done.stderr


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def test_a_coordinator_that_is_not_there_is_named_within_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    began = time.monotonic()
    line = refused("run", "--connect-timeout", "0.5", "--coordinator", f"127.0.0.1:{port}", THIS)
    assert line == f"cannot reach the coordinator at 127.0.0.1:{port} within 0.5 s: Connection refused"
    assert time.monotonic() - began < 0.5 + 5.0  # the rest is the start of Python


def test_a_port_in_use_is_named(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    assert refused("coordinator", "--port", str(port)) == f"cannot listen on 127.0.0.1:{port}: Address already in use"


def test_a_server_that_is_no_coordinator_is_named(tmp_path: Path, listener: socket.socket) -> None:
    """It accepts, and says nothing."""
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    options = ["--connect-timeout", "1", "--coordinator", address]
    with Job(tmp_path, script(tmp_path, ""), options=options) as job:
        assert job.wait() == 2
        assert job.stderr.splitlines() == [
            f"elasticgang: error: what answers at {address} is not a coordinator of elasticgang"
        ]
        assert job.events() == []


def test_a_layout_that_can_never_be_filled_ends_the_job_in_one_line(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """\
        import elasticgang as eg
        manager = eg.join(layout=eg.ParallelLayout(min_replicas=4))
        for step in manager.steps(1):
            raise AssertionError("not reached")
        """,
    )
    with Job(tmp_path, path, ranks=3) as job:
        assert job.wait() == 2
        job.assert_nothing_left()
        assert job.stderr.splitlines() == [
            "elasticgang: error: the layout needs 4 ranks (min_replicas 4 x pp 1 x sdp 1 x tp 1), but the job has 3"
        ]


# -- how it fails


def test_an_exception_on_every_rank_is_shown_once_and_whole(tmp_path: Path) -> None:
    path = training(tmp_path, body="deep(20)", setup="def deep(n): return deep(n - 1) if n else 1 / 0")
    with Job(tmp_path, path, ranks=3) as job:
        assert job.wait() == 1
        job.assert_nothing_left()
        assert job.stderr.count("ZeroDivisionError: division by zero") == 1
        assert job.stderr.count("Traceback (most recent call last)") == 1
        assert f'File "{path}", line' in job.stderr
        assert "runpy" not in job.stderr
        reason = r"elasticgang: error: rank \d exited with code 1 before its first committed step$"
        assert re.search(reason, job.stderr, re.MULTILINE)


def test_nothing_is_told_after_why_the_job_has_failed(tmp_path: Path) -> None:
    body = """
                if rank == 1:
                    raise ValueError("no")
    """
    with Job(tmp_path, training(tmp_path, body=body), ranks=2) as job:
        assert job.wait() == 1
    own = [line for line in job.stderr.splitlines() if line.startswith("elasticgang: ")]
    assert any(line.startswith("elasticgang: generation 1") for line in own)
    assert own[-1].startswith("elasticgang: error: ")
    told = [event["event"] for event in job.events() if event["event"] in ("generation_change", "failed")]
    assert told[-1] == "failed"


def test_an_exception_before_joining_is_shown_too(tmp_path: Path) -> None:
    with Job(tmp_path, script(tmp_path, "raise ValueError('before')")) as job:
        assert job.wait() == 1
        assert job.stderr.count("ValueError: before") == 1


def test_a_rank_whose_script_fails_once_is_restarted_by_default(tmp_path: Path) -> None:
    body = """if rank == 1 and step.index == 5 and not (here / "failed").exists():
                    (here / "failed").touch()
                    raise OSError("of this machine")
                while rank != 1 and step.index == 7 and not (here / "back").exists():
                    time.sleep(0.005)"""
    setup = 'if rank == 1 and (here / "failed").exists(): (here / "back").touch()'
    path = training(tmp_path, steps=9, setup=setup, body=body, after='print("finished", manager.committed_steps)')
    with Job(tmp_path, path, ranks=3) as job:
        assert job.wait() == 0, job.stderr
        assert job.stdout.count("finished 9") >= 2  # and the restarted one, if it came back in time
        assert job.stderr.count("OSError: of this machine") == 1
        assert "rank 1 exited with code 1 in step 5: restart 1 of 3 that it has in an hour" in job.stderr


def test_a_step_in_which_the_script_fails_again_ends_the_job(tmp_path: Path) -> None:
    """On every rank, so that the others fail when they try it without the first. In a step that all begin, after some
    that all have committed: the last holder of the state would end the job otherwise."""
    setup = """
        together = 0

        def fails(index):
            global together
            together = together + 1 if manager.gangs.root.size == 3 else 0
            agreed = here / "step"
            if together == 4 and not agreed.exists():
                (here / f"step-{rank}").write_text(str(index))
                os.replace(here / f"step-{rank}", agreed)
            return agreed.exists() and index == int(agreed.read_text())
        """
    body = 'if fails(step.index): raise ValueError("of the script")'
    with Job(tmp_path, training(tmp_path, steps=10**9, setup=setup, body=body), ranks=3) as job:
        assert job.wait() == 1
        job.assert_nothing_left()
        assert job.stderr.count("ValueError: of the script") == 1
        assert job.stderr.count("Traceback (most recent call last)") == 1
        step = (tmp_path / "step").read_text()
        reason = rf"elasticgang: error: rank \d exited with code 1 in step {step}, in which rank \d had failed too$"
        assert re.search(reason, job.stderr, re.MULTILINE)


def test_a_rank_that_fails_whenever_it_comes_back_ends_the_job(tmp_path: Path) -> None:
    setup = """if (here / "failed").exists() and rank == 1:
            raise ValueError("when it builds")"""
    body = """if rank == 1 and step.index == 5:
                    (here / "failed").touch()
                    raise OSError("of this machine")"""
    with Job(tmp_path, training(tmp_path, steps=10**9, setup=setup, body=body), ranks=3) as job:
        assert job.wait() == 1
        job.assert_nothing_left()
        assert job.stderr.count("ValueError: when it builds") == 1
        error = "elasticgang: error: rank 1 exited with code 1 before it began a step, again"
        assert job.stderr.splitlines()[-1] == error


def test_a_rank_that_fails_in_one_step_after_the_other_uses_up_its_restarts(tmp_path: Path) -> None:
    body = """if rank == 1 and step.index >= 5:
                    raise OSError(f"in step {step.index}")"""
    path = training(tmp_path, steps=10**9, body=body)
    with Job(tmp_path, path, ranks=2, options=["--max-restarts", "2"]) as job:
        assert job.wait() == 1
        job.assert_nothing_left()
        assert len(re.findall(r"^OSError: in step \d+$", job.stderr, re.MULTILINE)) == 3
        error = "elasticgang: error: rank 1 exited with code 1; --max-restarts is 2 for each rank in an hour"
        assert job.stderr.splitlines()[-1] == error
        spawned = [event["local_rank"] for event in job.events() if event["event"] == "spawned"]
        assert spawned.count(1) == 3


def test_an_exception_while_the_model_is_built_ends_the_job_at_once(tmp_path: Path) -> None:
    with Job(tmp_path, training(tmp_path, setup='if rank == 1: raise ValueError("while it builds")'), ranks=3) as job:
        assert job.wait() == 1
        job.assert_nothing_left()
        assert job.stderr.count("ValueError: while it builds") == 1
        error = "elasticgang: error: rank 1 exited with code 1 before its first committed step"
        assert job.stderr.splitlines()[-1] == error
        spawned = [event["local_rank"] for event in job.events() if event["event"] == "spawned"]
        assert spawned.count(1) == 1


def test_a_rank_that_raises_and_does_not_exit_has_failed_when_it_is_killed(tmp_path: Path) -> None:
    """A thread of the script holds up its exit."""
    setup = """import threading"""
    body = """if rank == 1 and step.index == 5:
                    threading.Thread(target=time.sleep, args=(600,)).start()
                    raise ValueError("and a thread is left")"""
    path = training(tmp_path, steps=10**9, setup=setup, body=body)
    with Job(tmp_path, path, ranks=2, options=["--max-restarts", "0"]) as job:
        assert job.wait() == 1
        job.assert_nothing_left()
        assert job.stderr.count("ValueError: and a thread is left") == 1
        assert job.stderr.splitlines()[-1] == "elasticgang: error: rank 1 exited with code 1; --max-restarts is 0"


def test_a_rank_that_is_interrupted_by_itself_is_restarted_as_after_any_kill(tmp_path: Path) -> None:
    body = """if rank == 1 and step.index == 3 and not (here / "failed").exists():
                    (here / "failed").touch()
                    os.kill(os.getpid(), signal.SIGINT)"""
    path = training(tmp_path, steps=8, body=body, after='print("finished", manager.committed_steps)')
    with Job(tmp_path, path, ranks=3) as job:
        assert job.wait() == 0, job.stderr
        assert "was killed by SIGINT" in job.stderr
        assert "Traceback" not in job.stderr


def test_without_restarts_the_first_failure_ends_the_others(tmp_path: Path) -> None:
    path = training(tmp_path, steps=10**9, body='if rank == 1 and step.index == 3: raise RuntimeError("once")')
    with Job(tmp_path, path, ranks=3, options=["--max-restarts", "0"]) as job:
        assert job.wait() == 1
        job.assert_nothing_left()
        assert job.stderr.count("RuntimeError: once") == 1
        assert "rank 1 exited with code 1" in job.stderr


def test_a_restart_that_still_waits_does_not_hold_up_the_end(tmp_path: Path) -> None:
    setup = """if rank == 1:
            (here / "deaths").open("a").write("x")
            os.kill(os.getpid(), signal.SIGKILL)"""
    body = """while step.index == 1 and len((here / "deaths").read_text()) < 8: time.sleep(0.01)"""
    path = training(tmp_path, steps=3, setup=setup, body=body, after='print("over at", time.time(), flush=True)')
    with Job(tmp_path, path, ranks=2) as job:
        assert job.wait() == 0, job.stderr
        ended_at = time.time()
        (over_at,) = re.findall(r"over at ([0-9.]+)", job.stdout)
    assert ended_at - float(over_at) < ENDED_S  # the ninth start would be 4 s after the eighth death
    assert len((tmp_path / "deaths").read_text()) == 8


OWN_EXITS = [
    ("sys.exit(3)", 3, "rank 1 exited with code 3"),
    ("sys.exit('no data')", 1, "no data"),
    ("os._exit(7)", 7, "rank 1 exited with code 7"),
    ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "rank 1 was killed by SIGSEGV"),
]


def test_the_scripts_own_exit_code_is_the_jobs(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        jobs = []
        for number, (statement, _, _) in enumerate(OWN_EXITS):
            directory = tmp_path / str(number)
            directory.mkdir()
            text = f"""\
            import os, signal, sys, time
            if os.environ["LOCAL_RANK"] == "1":
                {statement}
            time.sleep(600)
            """
            jobs.append(stack.enter_context(Job(directory, script(directory, text))))
        for job, (_, code, words) in zip(jobs, OWN_EXITS, strict=True):
            assert job.wait() == code
            job.assert_nothing_left()
            assert words in job.stderr


def test_a_script_that_never_joins_may_end(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """\
        import os, sys
        print("argv", sys.argv[1:], "rank", os.environ["LOCAL_RANK"], "of", os.environ["LOCAL_WORLD_SIZE"], __name__)
        sys.exit(0 if os.environ["LOCAL_RANK"] == "1" else None)
        """,
    )
    with Job(tmp_path, path, "--lr", "3e-4", "-x") as job:
        assert job.wait() == 0
        assert sorted(job.stdout.splitlines()) == [
            f"[rank {rank} step 0] argv ['--lr', '3e-4', '-x'] rank {rank} of 2 __main__" for rank in range(2)
        ]
        (line,) = job.stderr.splitlines()
        assert "exited with code 0 and never called `elasticgang.join`" in line


def test_an_abort_does_not_keep_a_rank_from_hearing_its_agent(tmp_path: Path) -> None:
    """Rank 1 dies, then rank 2 leaves: two notices. Meanwhile a callback holds up the reader of the comm process, whose
    end the first notice would wait for."""
    setup = """import threading
        from elasticgang import testing
        is_held, let_go, notices = threading.Event(), threading.Event(), threading.Semaphore(0)
        testing.fail_at("abort_noticed", notices.release)
        def hold(future):
            is_held.set()
            let_go.wait(60)"""
    body = """if step.index == 2 and not (here / "over").exists():
                    work = manager.gangs.root.all_reduce(torch.ones(1), eg.ReduceOperation.SUM, async_op=True) \\
                        if rank == 0 else None
                    if rank == 0:
                        held = work.get_future().then(hold)
                        (here / "set").touch()
                        is_held.wait(60)
                        (here / "held").write_text("yes\\n")
                        (here / "over").write_text(str(sum(notices.acquire(timeout=5) for _ in range(2))))
                        let_go.set()
                    else:
                        while not (here / "set").exists():
                            time.sleep(0.005)
                        manager.gangs.root.all_reduce(torch.ones(1), eg.ReduceOperation.SUM)"""
    path = training(tmp_path, steps=8, setup=setup, body=body)
    with Job(tmp_path, path, ranks=3) as job:
        job.expect_file(tmp_path / "held")
        os.kill(job.rank_pid(1), signal.SIGKILL)
        assert job.wait() == 0, job.stderr
        assert (tmp_path / "over").read_text() == "2"


# -- how it is ended

TRAIN_FOR_EVER = 10**9


def ignoring(directory: Path) -> Path:
    """Ranks that ignore what can be ignored, with children that do too."""
    return script(
        directory,
        f"""\
        import os, pathlib, signal, time
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        busy = os.fork()
        while busy == 0:
            pass
        pathlib.Path({str(directory)!r}, "ready-" + os.environ["LOCAL_RANK"]).write_text("ready\\n")
        time.sleep(600)
        """,
    )


def loading(directory: Path) -> Path:
    """Ranks whose DataLoader has busy workers, forked while comm processes start and stop."""
    return training(
        directory,
        steps=TRAIN_FOR_EVER,
        setup="""
        class Busy(torch.utils.data.Dataset):
            def __len__(self): return 10**6
            def __getitem__(self, index):
                end = time.monotonic() + (600 if index > 4 else 0)
                while time.monotonic() < end: pass
                return index
        batch = iter(torch.utils.data.DataLoader(Busy(), num_workers=2, prefetch_factor=8))""",
        body="""if step.index == 1: next(batch)
                if step.index == 5: (here / f"ready-{rank}").write_text("ready\\n")""",
    )


def started(job: Job, ranks: int = 2) -> None:
    for rank in range(ranks):
        job.expect_file(job.directory / f"ready-{rank}")


@pytest.mark.parametrize("make", [loading, ignoring])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_in_time(tmp_path: Path, number: signal.Signals, make: Callable[[Path], Path]) -> None:
    with Job(tmp_path, make(tmp_path)) as job:
        started(job)
        began = time.monotonic()
        job.process.send_signal(number)
        assert job.wait() == 128 + number
        job.assert_nothing_left(began + ENDED_S - time.monotonic())
        assert time.monotonic() - began < ENDED_S
        assert "Traceback" not in job.stderr


def test_a_rank_may_use_the_grace_period(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        f"""\
        import pathlib, os, signal, sys, time
        def save(number, frame):
            time.sleep(0.2)
            print("saved", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        pathlib.Path({str(tmp_path)!r}, "ready-" + os.environ["LOCAL_RANK"]).write_text("ready\\n")
        time.sleep(600)
        """,
    )
    with Job(tmp_path, path, options=["--grace-period", "30"]) as job:
        started(job)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(20.0) == 143
        assert job.stdout.count("saved") == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["the agent imports", "the fork server imports", "ranks are started"])
def test_a_signal_while_it_starts_ends_everything_in_time(tmp_path: Path, number: signal.Signals, moment: str) -> None:
    with Job(tmp_path, ignoring(tmp_path)) as job:
        wait_for_moment(job, moment)
        began = time.monotonic()
        job.process.send_signal(number)
        assert job.wait() in (128 + number, -number)
        job.assert_nothing_left(began + ENDED_S - time.monotonic())
        assert time.monotonic() - began < ENDED_S


def wait_for_moment(job: Job, moment: str) -> None:
    agent = psutil.Process(job.process.pid)
    if moment == "the agent imports":
        wait_until(lambda: any("libtorch" in found.path for found in agent.memory_maps()), moment)
    elif moment == "the fork server imports":
        wait_until(agent.children, moment)
    else:
        job.expect("spawned")


@pytest.mark.parametrize("make", [loading, ignoring])
def test_nothing_is_left_of_a_killed_agent(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    with Job(tmp_path, make(tmp_path)) as job:
        started(job)
        assert len(job.processes()) >= 1 + 1 + 1 + 2 + 2  # agent, fork server, coordinator, ranks, their children
        job.process.kill()
        job.assert_nothing_left(AT_ONCE_S)


@pytest.mark.parametrize("moment", ["the fork server imports", "ranks are started"])
def test_nothing_is_left_of_an_agent_that_is_killed_while_it_starts(tmp_path: Path, moment: str) -> None:
    with Job(tmp_path, ignoring(tmp_path)) as job:
        wait_for_moment(job, moment)
        job.process.kill()
        job.assert_nothing_left(AT_ONCE_S)


def test_nothing_is_left_when_the_fork_server_is_killed_and_then_the_agent(tmp_path: Path) -> None:
    with Job(tmp_path, loading(tmp_path)) as job:
        started(job)
        job.fork_server().kill()
        job.process.kill()
        job.assert_nothing_left(AT_ONCE_S)


def test_a_coordinator_of_its_own_ends_by_a_signal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "elasticgang", "coordinator", "--port", "0"]
    with Command(tmp_path, command) as coordinator:
        wait_until(lambda: coordinator.stdout.endswith("\n"), "its address")
        address = coordinator.stdout.removeprefix("coordinator listening on ").strip()
        path = training(tmp_path, steps=3)
        with Job(tmp_path / "job", path, options=["--coordinator", address]) as job:
            assert job.wait() == 0, job.stderr
        coordinator.process.send_signal(signal.SIGTERM)
        assert coordinator.wait(10.0) == 0
        coordinator.assert_nothing_left()


# -- what it prints


def test_output_has_its_rank_and_step_in_front(tmp_path: Path) -> None:
    body = """print("in step", step.index)
                print("to stderr", step.index, file=sys.stderr)"""
    path = training(tmp_path, steps=3, body=body, after='os.write(1, b"two\\nlines, and no end")')
    with Job(tmp_path, path) as job:
        assert job.wait() == 0
        for text, name in ((job.stdout, "in step"), (job.stderr, "to stderr")):
            for rank in range(2):
                for step in range(3):
                    # The step that is shown is that of the moment when the agent reads the line.
                    assert re.search(rf"^\[rank {rank} step [0-3]\] {name} {step}$", text, re.MULTILINE)
        for rank in range(2):
            assert re.search(rf"^\[rank {rank} step [1-3]\] two$", job.stdout, re.MULTILINE)
            assert re.search(rf"^\[rank {rank} step [1-3]\] lines, and no end$", job.stdout, re.MULTILINE)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_goes_away_does_no_harm(tmp_path: Path, stream: str) -> None:
    path = training(tmp_path, steps=20, body=f'print("x" * 5000, file=sys.{stream})', after='(here / "end").touch()')
    command = [sys.executable, "-m", "elasticgang", "run", "--nproc-per-node", "2", "--log-level", "warning", str(path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ) as process:
        closing, other = (process.stdout, process.stderr) if stream == "stdout" else (process.stderr, process.stdout)
        assert closing is not None
        assert other is not None
        assert closing.readline().startswith(b"[rank ")
        closing.close()
        assert other.read() == b""
        assert process.wait(60) == 0
    assert (tmp_path / "end").exists()


def test_a_terminal_that_stands_still_holds_up_no_recovery(tmp_path: Path) -> None:
    """Nobody reads what the agent itself has to say."""
    body = """time.sleep(0.01)
                if rank == 0 and step.index == 3: os.write(2, b"x\\n" * 20_000)
                if rank == 1 and step.index == 5 and not (here / "died").exists():
                    (here / "died").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                if rank == 2 and step.index == 30: (here / "went-on").touch()"""
    path = training(tmp_path, steps=TRAIN_FOR_EVER, body=body)
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "elasticgang", "run", "--nproc-per-node", "3", str(path)]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=writer, env=env) as process:
        os.close(writer)
        try:
            wait_until((tmp_path / "went-on").exists, "the step after the death")
            process.send_signal(signal.SIGINT)
            assert process.wait(GRACE_S + ENDED_S) == 130
        finally:
            process.kill()
            os.close(reader)


# -- alone


def test_alone_it_is_one_process_with_the_same_result(tmp_path: Path) -> None:
    job_script = REPOSITORY / "tests" / "chaos" / "job.py"
    code = f"""\
import sys, runpy, psutil
sys.argv[1:] = ["--steps", "10", "--output-dir", {str(tmp_path / "alone")!r}]
(path := __import__("pathlib").Path(sys.argv[4])).mkdir()
runpy.run_path({str(job_script)!r}, run_name="__main__")
me = psutil.Process()
assert not me.children(recursive=True)
assert not me.net_connections()
"""
    command = [sys.executable, "-c", code]
    subprocess.run(command, check=True, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, timeout=60)
    together = tmp_path / "together"
    with Job(together, job_script, "--steps", "10", "--output-dir", str(together)) as job:
        assert job.wait() == 0, job.stderr
    digests = [
        json.loads(path.read_text().splitlines()[-1])["digest"]
        for directory in ("alone", "together")
        for path in (tmp_path / directory / "history").iterdir()
    ]
    assert len(digests) == 3
    assert len(set(digests)) == 1


def test_what_torch_says_of_a_lost_coordinator_is_said_by_ranks_alone(tmp_path: Path) -> None:
    body = 'time.sleep(0.01); (here / f"at-{rank}").write_text(os.environ["TORCH_CPP_LOG_LEVEL"] + chr(10))'
    path = training(tmp_path, steps=100_000, body=body)
    with Job(tmp_path, path, ranks=2, env={"TORCH_CPP_LOG_LEVEL": "WARNING"}) as job:
        assert job.expect_file(tmp_path / "at-1") == "WARNING\n"  # as the user has set it
        (coordinator,) = [process for process in job.processes() if process.name() == "eg-coordinator"]
        coordinator.kill()
        job.expect("coordinator reachable")
        job.process.terminate()
        assert job.wait() == 128 + signal.SIGTERM
    assert [line for line in job.stderr.splitlines() if not line.startswith(("elasticgang: ", "[rank "))] == []
