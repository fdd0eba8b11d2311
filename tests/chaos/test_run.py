"""`elasticgang run` as its users meet it: what it refuses, how it is ended, and what it prints."""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

import psutil
import pytest

from scripts.demo_job.processes import ELASTICGANG
from tests.chaos.training_scripts import script, training
from tests.exhaustive import exhaustive
from tests.preloaded import PreloadedProcess
from tests.support import PROMPT_S, REPOSITORY, Command, Job, environment, reserved_port, wait_until

AT_ONCE_S = 1.0  # as the issue promises for what was left by a killed agent
ENDED_S = 2.0  # and for Ctrl-C
GRACE_S = 1.0  # the default of --grace-period
MOST_TRIES = 5


def assert_in_time(directory: Path, limit_s: float, attempt: Callable[[Path], float]) -> None:
    """`attempt`, in a directory of its own, takes no longer than that. The quickest of some tries counts: the machine
    may stand still in one of them."""
    found_s: list[float] = []
    while not found_s or found_s[-1] > limit_s:
        assert len(found_s) < MOST_TRIES, f"after so many seconds: {found_s}"
        (own := directory / f"try-{len(found_s)}").mkdir()
        found_s.append(attempt(own))


def seconds_to_end(job: Job, number: signal.Signals) -> float:
    """From the signal, which the agent gets, to the end of all processes."""
    began = time.monotonic()
    job.process.send_signal(number)
    assert job.wait() in (128 + number, -number)
    job.assert_nothing_left()
    return time.monotonic() - began


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
            "--nnodes of more than one host needs --coordinator, at an address that all hosts reach, and a --job-id",
        ),
        (
            ["--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:1", THIS],
            "--nnodes of more than one host needs a --job-id, the same on all hosts",
        ),
        (["--heal-interfaces", "lo", THIS], "--heal-interfaces is for jobs of several hosts: it needs --coordinator"),
        (["--coordinator", "nowhere", THIS], "--coordinator must be HOST:PORT, but is 'nowhere' instead"),
        (["--coordinator", "a..b:1", THIS], "--coordinator: 'a..b' is not a valid host name"),
        (["--coordinator", "h:\u00b2", THIS], "--coordinator must be HOST:PORT, but is 'h:\u00b2' instead"),
        (["--job-id", "", THIS], "--job-id must be 1 to 100 bytes long, but is '' instead"),
        (["--job-id", "a\udcff", THIS], "--job-id must be UTF-8, but is b'a\\xff' instead"),
        (["--coordinator", "a:99999", THIS], "--coordinator must be HOST:PORT, but is 'a:99999' instead"),
        (
            ["--standalone", "--coordinator", "127.0.0.1:1", THIS],
            "--standalone starts an embedded coordinator; leave out --coordinator or --standalone",
        ),
    ],
)
def test_a_bad_command_line_is_refused_in_one_line(arguments: list[str], line: str) -> None:
    assert refused("run", *arguments) == line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["grant", "--coordinator", "h:1", "--job-id", "\udcff"], "--job-id must be UTF-8, but is b'\\xff' instead"),
        (
            ["grant", "--coordinator", "h:1", "--job-id", ""],
            "--job-id must be 1 to 100 bytes long, but is '' instead",
        ),
        (["coordinator", "--host", "é..x"], "--host: 'é..x' is not a valid host name"),
        (["coordinator", "--host", "a..b", "--port", "0"], "--host: 'a..b' is not a valid host name"),
    ],
)
def test_names_that_cannot_be_are_refused_in_one_line(arguments: list[str], line: str) -> None:
    assert refused(*arguments) == line


def test_a_working_directory_that_is_gone_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    command = ["sh", "-c", 'rmdir "$PWD" && exec "$@"', "sh", str(ELASTICGANG), "run", "-m", "json.tool"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path / "gone")
    assert done.returncode == 2
    assert done.stderr == (
        "elasticgang: error: the working directory cannot be found (No such file or directory): "
        "change to one that is there\n"
    )


@pytest.mark.parametrize(
    ("init", "error"), [("x = (", "SyntaxError"), ("import no_such_module", "No module named 'no_such_module'")]
)
def test_a_package_that_cannot_be_imported_fails_in_the_rank(tmp_path: Path, init: str, error: str) -> None:
    """The command itself imports nothing of it."""
    (tmp_path / "badpkg").mkdir()
    (tmp_path / "badpkg" / "__init__.py").write_text(init)
    (tmp_path / "badpkg" / "train.py").touch()
    command = [sys.executable, "-m", "elasticgang", "run", "-m", "badpkg.train"]
    with Command(tmp_path, command, preloaded=True) as running:
        assert running.wait() == 1, running.stderr
        assert "elasticgang: rank 0 failed:\n" in running.stderr
        assert error in running.stderr
        assert "elasticgang/launch" not in running.stderr


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def test_a_coordinator_that_is_not_there_is_named_within_the_timeout() -> None:
    with socket.socket() as taken:  # nobody listens there, and nobody else can
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        began = time.monotonic()
        line = refused("run", "--connect-timeout", "2.5", "--coordinator", f"127.0.0.1:{port}", THIS)
    assert line == f"cannot reach the coordinator at 127.0.0.1:{port} within 2.5 s: Connection refused"
    assert time.monotonic() - began < 2.5 + 10.0  # the rest is the start of Python; the default is 30 s


def test_a_port_in_use_is_named(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    assert refused("coordinator", "--port", str(port)) == f"cannot listen on 127.0.0.1:{port}: Address already in use"


def test_a_server_that_is_no_coordinator_is_named(tmp_path: Path, listener: socket.socket) -> None:
    """It accepts, and says nothing."""
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    options = ["--connect-timeout", "3", "--coordinator", address]
    with Job(tmp_path, script(tmp_path, ""), options=options) as job:
        assert job.wait() == 2
        assert job.stderr.splitlines() == [
            f"elasticgang: error: what listens at {address} has not answered for 3 s: it is no coordinator of "
            "elasticgang, or its host is overloaded"
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


@pytest.mark.alone  # it has a time bound
@pytest.mark.parametrize("make", [loading, ignoring])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_in_time(tmp_path: Path, number: signal.Signals, make: Callable[[Path], Path]) -> None:
    def attempt(directory: Path) -> float:
        with Job(directory, make(directory)) as job:
            started(job)
            took_s = seconds_to_end(job, number)
            assert job.process.returncode == 128 + number
            assert "Traceback" not in job.stderr
        return took_s

    assert_in_time(tmp_path, ENDED_S, attempt)


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


# STOP-HUP
def test_a_job_under_nohup_goes_on_when_its_login_ends(tmp_path: Path) -> None:
    body = '(here / f"at-{rank}").write_text("1\\n"); wait_for(here / "go")'
    path = training(tmp_path, steps=3, body=body, setup=WAIT_FOR)
    with Job(tmp_path, path, prefix=["nohup"], options=["--status-port", "0"]) as job:
        job.expect_file(tmp_path / "at-0")
        for process in (psutil.Process(job.process.pid), job.page_server()):
            process.send_signal(signal.SIGHUP)
        (tmp_path / "go").touch()
        assert job.wait() == 0, job.stderr


@pytest.mark.alone  # it has a time bound
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["the agent imports", "the fork server imports", "ranks are started"])
def test_a_signal_while_it_starts_ends_everything_in_time(tmp_path: Path, number: signal.Signals, moment: str) -> None:
    def attempt(directory: Path) -> float:
        with Job(directory, ignoring(directory), fresh=moment != "ranks are started") as job:
            wait_for_moment(job, moment)
            return seconds_to_end(job, number)

    assert_in_time(tmp_path, ENDED_S, attempt)


def test_an_interrupt_while_the_command_line_is_imported_prints_nothing(tmp_path: Path) -> None:
    interrupting = """\
        import importlib.abc, os, signal, sys
        class Interrupt(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name == "elasticgang.launch.arguments":
                    os.kill(os.getpid(), signal.SIGINT)
        sys.meta_path.insert(0, Interrupt())
        """
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(interrupting))
    env = environment() | {"PYTHONPATH": f"{REPOSITORY}:{tmp_path}"}
    done = subprocess.run([str(ELASTICGANG), "run", THIS], capture_output=True, text=True, timeout=60, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


# STOP-HELD
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_callback_of_an_import_is_not_lost(tmp_path: Path, number: signal.Signals) -> None:
    """Python forgets an exception, and so a KeyboardInterrupt, in a callback of a weak reference."""
    interrupting = f"""\
        import importlib.abc, os, signal, sys, weakref
        class Referent: pass
        class Interrupt(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name == "elasticgang.agent.agent":
                    sys.meta_path.remove(self)
                    referent = Referent()
                    reference = weakref.ref(referent, lambda dead: os.kill(os.getpid(), {int(number)}))
                    del referent
        if "elasticgang" in sys.orig_argv:
            sys.meta_path.insert(0, Interrupt())
        """
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(textwrap.dedent(interrupting))
    path = f"{REPOSITORY}:{tmp_path / 'site'}"
    with Job(tmp_path, ignoring(tmp_path), env={"PYTHONPATH": path}, fresh=True) as job:
        assert job.wait() == 128 + number
        job.assert_nothing_left()


def test_ranks_find_what_they_need_imported(tmp_path: Path) -> None:
    """Also one that heals, and its source. What a rank imports anew costs its restart time, and it memory of its
    own. torch imports a module at its first backward pass."""
    path = training(tmp_path, steps=100_000, body=DIES_ONCE)
    path.write_text(f"{NEW_MODULES}\n{path.read_text()}")
    with Job(tmp_path, path, fresh=True) as job:
        assert [job.expect_file(tmp_path / f"new-{rank}") for rank in (1, 0)] == ["\n", "\n"]


NEW_MODULES = """
import sys
before = set(sys.modules)
def new():
    return sorted(name for name in set(sys.modules) - before if not name.startswith("torch."))
"""
DIES_ONCE = """
                died = here / "died"
                if rank == 1 and step.index == 2 and not died.exists():
                    died.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                if (here / "new-1").exists() if rank == 0 else died.exists():
                    (here / f"new-{rank}").write_text(" ".join(new()) + "\\n")
                time.sleep(0.01)
"""


def test_ranks_draw_different_random_numbers(tmp_path: Path) -> None:
    path = tmp_path / "draw.py"
    path.write_text("import numpy, random\nprint('drew', numpy.random.rand(), random.random(), flush=True)\n")
    with Job(tmp_path, path) as job:
        assert job.wait() == 0
        drawn = [line.split()[-2:] for line in job.stdout.splitlines() if "drew" in line]
    assert len(drawn) == 2
    assert all(ours != theirs for ours, theirs in zip(*drawn, strict=True))


# STOP-LATE
def test_signals_do_not_change_how_a_job_has_ended(tmp_path: Path) -> None:
    """They come while the agent waits for the server of the page, which stands still."""
    path = training(tmp_path, steps=1, body='wait_for(here / "go")', setup=WAIT_FOR)
    with Job(tmp_path, path, options=["--status-port", "0"]) as job:
        job.expect("spawned")
        server = job.page_server()
        server.suspend()
        (tmp_path / "go").touch()
        agent = psutil.Process(job.process.pid)
        wait_until(lambda: agent.children() == [server], "all others have ended")
        while job.process.poll() is None:
            job.process.send_signal(signal.SIGTERM)
            job.process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        assert job.wait() == 0
        job.assert_nothing_left()
    assert "Traceback" not in job.stderr


WAIT_FOR = """
        def wait_for(path):
            while not path.exists():
                time.sleep(0.01)
"""


def wait_for_moment(job: Job, moment: str) -> None:
    agent = psutil.Process(job.process.pid)
    if moment == "the agent imports":
        wait_until(lambda: any("_asyncio" in found.path for found in agent.memory_maps()), moment)
    elif moment == "the fork server imports":
        wait_until(agent.children, moment)
    else:
        job.expect("spawned")


# LINK-2
@pytest.mark.alone  # it has a time bound
@pytest.mark.parametrize("make", [loading, ignoring])
def test_nothing_is_left_of_a_killed_agent(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    def attempt(directory: Path) -> float:
        with Job(directory, make(directory)) as job:
            started(job)
            assert len(job.processes()) >= 1 + 1 + 1 + 2 + 2  # agent, fork server, coordinator, ranks, their children
            return seconds_to_end(job, signal.SIGKILL)

    assert_in_time(tmp_path, AT_ONCE_S, attempt)


@pytest.mark.alone  # it has a time bound
@pytest.mark.parametrize("moment", ["the fork server imports", "ranks are started"])
def test_nothing_is_left_of_an_agent_that_is_killed_while_it_starts(tmp_path: Path, moment: str) -> None:
    def attempt(directory: Path) -> float:
        with Job(directory, ignoring(directory), fresh=moment != "ranks are started") as job:
            wait_for_moment(job, moment)
            return seconds_to_end(job, signal.SIGKILL)

    assert_in_time(tmp_path, AT_ONCE_S, attempt)


@pytest.mark.alone  # it has a time bound
def test_nothing_is_left_when_the_fork_server_is_killed_and_then_the_agent(tmp_path: Path) -> None:
    def attempt(directory: Path) -> float:
        with Job(directory, loading(directory)) as job:
            started(job)
            job.fork_server().kill()
            return seconds_to_end(job, signal.SIGKILL)

    assert_in_time(tmp_path, AT_ONCE_S, attempt)


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


# OUTPUT-2
def test_a_coordinator_leads_jobs_although_nothing_that_it_prints_can_be_written(tmp_path: Path) -> None:
    with reserved_port() as port, open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "elasticgang", "coordinator", "--port", str(port)]
        with Command(tmp_path, command, stdout=full.fileno()) as coordinator:
            options = ["--connect-timeout", "60", "--coordinator", f"127.0.0.1:{port}"]
            with Job(tmp_path / "job", training(tmp_path, steps=3), options=options) as job:
                assert job.wait() == 0, job.stderr
            coordinator.process.send_signal(signal.SIGTERM)
            assert coordinator.wait(10.0) == 0


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
    with PreloadedProcess(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        cwd=tmp_path,
    ) as process:
        closing, other = (process.stdout, process.stderr) if stream == "stdout" else (process.stderr, process.stdout)
        assert closing is not None
        assert other is not None
        assert closing.readline().startswith(b"[rank ")
        closing.close()
        assert other.read() == b""
        assert process.wait(60) == 0
    assert (tmp_path / "end").exists()


def test_a_command_without_standard_streams_runs(tmp_path: Path) -> None:
    path = training(tmp_path, body='print("said"); print("said", file=sys.stderr)', after='(here / "end").touch()')
    command = [sys.executable, "-m", "elasticgang", "run", "--nproc-per-node", "2", str(path)]
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    assert subprocess.run([*closed, *command], env=environment(), cwd=tmp_path, timeout=120).returncode == 0
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
    files: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": writer}
    with PreloadedProcess(command, **files, env=environment(), cwd=tmp_path) as process:
        os.close(writer)
        try:
            wait_until((tmp_path / "went-on").exists, "the step after the death")
            process.send_signal(signal.SIGINT)
            assert process.wait(GRACE_S + PROMPT_S) == 130
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
    subprocess.run(command, check=True, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, timeout=100)
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


@exhaustive
def test_what_torch_says_of_a_lost_coordinator_is_said_by_ranks_alone(tmp_path: Path) -> None:
    body = 'time.sleep(0.01); (here / f"at-{rank}").write_text(os.environ["TORCH_CPP_LOG_LEVEL"] + chr(10))'
    path = training(tmp_path, steps=100_000, body=body)
    with Job(tmp_path, path, ranks=2, env={"TORCH_CPP_LOG_LEVEL": "WARNING"}, fresh=True) as job:
        assert job.expect_file(tmp_path / "at-1") == "WARNING\n"  # as the user has set it
        job.coordinator().kill()
        job.expect("coordinator reachable")
        job.process.terminate()
        assert job.wait() == 128 + signal.SIGTERM
    assert [line for line in job.stderr.splitlines() if not line.startswith(("elasticgang: ", "[rank "))] == []


# OWN-PATH
def test_files_of_the_working_directory_are_not_taken_for_python_s(tmp_path: Path) -> None:
    """The agent's fork server, page and writers of checkpoints are started there."""
    for name in ("queue", "socket", "types", "random", "json"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('this is the module of the user')")
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "beside.py").write_text("")
    setup = (
        f'manager.checkpoints({str(tmp_path / "saved")!r}, every_steps=2); import beside; print("path", sys.path[0])'
    )
    path = training(scripts, setup=setup)
    options = ["--status-port", "0"]
    with Job(tmp_path, path, ranks=1, options=options, program=(str(ELASTICGANG),), fresh=True) as job:
        assert job.wait() == 0, job.stderr
        assert job.stdout.endswith(f"path {scripts}\n")
        assert list((tmp_path / "saved").iterdir())
        assert "RuntimeError" not in job.stderr
