"""Commands of tests that are forked from a process that has imported torch are as those that are executed."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.chaos.training_scripts import script, training
from tests.exhaustive import exhaustive
from tests.support import DEADLINE_S, REPOSITORY, Command, Job, run_preloaded, wait_until

pytestmark = pytest.mark.timeout(2 * DEADLINE_S + 60)  # processes import torch, on whatever the machine has left

BODY = '(here / f"at-{rank}").write_text(f"{os.getppid()}\\n"); time.sleep(600)'


def is_fork_server(process: psutil.Process) -> bool:
    try:
        return bool(process.name() == "eg-forkserver")
    except psutil.NoSuchProcess:  # it has just ended
        return False


def is_subreaper() -> int:
    found = ctypes.c_int()
    ctypes.CDLL(None).prctl(37, ctypes.byref(found), 0, 0, 0)
    return found.value


@pytest.mark.parametrize("fresh", [pytest.param(True, marks=exhaustive), False])
def test_all_processes_of_a_job_are_found_and_end_with_its_agent(fresh: bool, tmp_path: Path) -> None:
    with Job(tmp_path, training(tmp_path, body=BODY), ranks=2, fresh=fresh) as job:
        assert {job.expect_file(tmp_path / f"at-{rank}") for rank in range(2)} == {f"{job.process.pid}\n"}
        found = {process.pid: process for process in job.processes()}
        agent, server = found[job.process.pid], found[job.fork_server().pid]
        assert {job.rank_pid(0), job.rank_pid(1)} < found.keys()
        assert (server.name(), server.ppid()) == ("eg-forkserver", agent.pid)
        assert ("libtorch" in "".join(entry.path for entry in agent.memory_maps())) is not fresh
        assert any("elasticgang.process.forkserver" in part for part in server.cmdline())
        job.process.kill()
        job.assert_nothing_left()


AGENT_MODULES = """
import sys
from tests import preloaded

before = set(sys.modules)
import elasticgang, elasticgang.train, torch, torchft
assert not {"elasticgang.agent.agent", "elasticgang.launch.cli", "elasticgang.launch.run"} - before
assert not {"elasticgang.train", "torch", "torchft"} & before
preloaded.hide_modules()
assert not {name for name in set(sys.modules) - before if name.partition(".")[0] in ("elasticgang", "torch")}
assert not hasattr(elasticgang, "train")
import elasticgang.environment, elasticgang.launch.commands
"""


@exhaustive
def test_an_agent_that_is_forked_has_the_modules_that_one_imports_and_none_of_torch() -> None:
    command = [sys.executable, "-c", AGENT_MODULES]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr


def test_an_agent_that_is_forked_exits_as_one_that_is_executed(tmp_path: Path) -> None:
    for arguments in (["--version"], ["run"], ["run", str(tmp_path / "missing.py")]):
        command = [sys.executable, "-m", "elasticgang", *arguments]
        executed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE_S)
        forked = run_preloaded(command)
        assert (forked.returncode, forked.stdout, forked.stderr) == (
            executed.returncode,
            executed.stdout,
            executed.stderr,
        )


def test_a_job_replaces_the_fork_server_that_it_was_offered(tmp_path: Path) -> None:
    with Job(tmp_path, training(tmp_path, body=BODY), ranks=1) as job:
        job.expect_file(tmp_path / "at-0")
        before = job.fork_server()
        before.kill()
        wait_until(lambda: [new for new in job.processes() if new != before and is_fork_server(new)], "another")


@pytest.mark.parametrize("at_once", [False, True])
def test_a_program_has_its_arguments_environment_exit_functions_and_exit_code(at_once: bool, tmp_path: Path) -> None:
    text = """
        import atexit, os, pathlib, sys, threading, time
        atexit.register(print, "last")
        threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
        print(__name__, sys.argv[1:], os.environ["GIVEN"], pathlib.Path.cwd().name, sys.path[0] in sys.argv[0])
        print("told", file=sys.stderr)
        sys.exit(3)
    """
    command = [sys.executable, str(script(tmp_path, text)), "a", "b"]
    env = {"GIVEN": "value"}
    with Command(tmp_path / "folder", command, env=env, preloaded=True, ends_at_once=at_once) as process:
        assert process.wait() == 3
        assert process.stdout == "__main__ ['a', 'b'] value folder True\nthread\nlast\n"
        assert process.stderr == "told\n"


NAMED = "tests.chaos.network"  # a module that is not imported for all


def test_a_program_finds_imported_what_its_command_names(tmp_path: Path) -> None:
    """Also the second one, which is forked from the same process, and not one that names nothing."""
    command = [sys.executable, str(script(tmp_path, f'import sys; print("{NAMED}" in sys.modules)'))]
    for number, imports in enumerate(([NAMED], [NAMED], [])):
        with Command(tmp_path / str(number), command, preloaded=True, imports=imports) as process:
            assert process.wait() == 0, process.stderr
            assert process.stdout == f"{bool(imports)}\n"


@pytest.mark.parametrize("at_once", [False, True])
def test_a_program_that_raises_fails(at_once: bool) -> None:
    before = is_subreaper()
    done = run_preloaded([sys.executable, "-m", "tests.integration.no_such_module"], ends_at_once=at_once)
    assert done.returncode == 1
    assert "No module named tests.integration.no_such_module" in done.stderr
    assert is_subreaper() == before
    assert psutil.Process(os.getpid()).children() != []  # what it was forked from


AGENT = """
import os, pathlib, sys
import torch
from scripts.demo_job.processes import start_command

agent = start_command(["run", "--nproc-per-node", "1", sys.argv[1]], pathlib.Path("agent.log"))
print(os.getpid(), agent.pid, flush=True)
sys.exit(agent.wait())
"""


def test_an_agent_that_a_program_starts_is_its_child_and_ends_with_it(tmp_path: Path) -> None:
    rank = training(tmp_path, body=BODY)
    (tmp_path / "program").mkdir()
    command = [sys.executable, str(script(tmp_path / "program", AGENT)), str(rank)]
    with Command(tmp_path / "folder", command, preloaded=True) as process:
        at = tmp_path / "at-0"
        wait_until(lambda: at.exists() and at.read_text().endswith("\n"), "a rank")
        agent = int(at.read_text())
        assert psutil.Process(agent).ppid() == process.process.pid
        assert wait_until(lambda: process.stdout, "what the program prints") == f"{process.process.pid} {agent}\n"
        process.process.kill()
        process.assert_nothing_left()


PROGRAM = """
import subprocess, sys
import torch

done = subprocess.run([sys.executable, "-u", sys.argv[1], "a", "b"], stdin=subprocess.DEVNULL)
print("ended with", done.returncode, flush=True)
"""
PART = """
import os, sys
has_torch = "torch" in sys.modules
print(__name__, sys.argv[1:], has_torch, os.getppid(), flush=True)
sys.exit(3)
"""


def test_a_script_that_a_program_starts_is_its_child_and_has_torch(tmp_path: Path) -> None:
    (tmp_path / "program").mkdir()
    command = [sys.executable, str(script(tmp_path / "program", PROGRAM)), str(script(tmp_path, PART))]
    with Command(tmp_path / "folder", command, preloaded=True) as process:
        assert process.wait() == 0, process.stderr
        assert process.stdout == f"__main__ ['a', 'b'] True {process.process.pid}\nended with 3\n"
        process.assert_nothing_left()
