"""What the processes of a job cost: `elasticgang run` imports no torch, and each has little memory to itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

from scripts.benches.memory import private_dirty
from tests.chaos.training_scripts import training
from tests.support import REPOSITORY, Job

_MOST_RSS_BYTES = 40_000_000
# That each has written to, as `scripts/bench memory` shows it.
_MOST_MB = {"coordinator": 5.5, "comm": 6.0, "forkserver": 4.0, "rank": 17.0}
if sys.version_info < (3, 11):  # a frame is kept for each function that was called: a coordinator calls 690
    _MOST_MB["coordinator"] = 5.8
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_AFTER_100 = """
                if step.index == 100:
                    (here / f"at-{rank}").write_text("\\n")
                while step.index == 100 and not (here / "go").exists():  # a comm process has more after 2000 steps
                    step.check()
                    time.sleep(0.01)
                time.sleep(0.01)
"""
_LIBRARIES = ("libtorch", "libc10", "_multiarray_umath")


def mapped(pid: int) -> set[str]:
    """The names of the files that the process has in its address space."""
    return {Path(mapping.path).name for mapping in psutil.Process(pid).memory_maps()}


def with_libraries(pid: int) -> list[str]:
    return sorted(name for name in mapped(pid) if name.startswith(_LIBRARIES))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Both ranks have done 100 steps, undisturbed, and wait for the file `go`."""
    directory = tmp_path_factory.mktemp("job")
    with Job(directory, training(directory, steps=99_999, body=_AFTER_100), fresh=True) as started:
        for rank in range(2):
            started.expect_file(directory / f"at-{rank}")
        yield started


@pytest.mark.skipif(
    _HUGE_PAGES.exists() and "[always]" in _HUGE_PAGES.read_text(), reason="the first byte of a page takes 2 MB here"
)
@pytest.mark.timeout(240)
def test_each_process_has_little_memory_to_itself(job: Job) -> None:
    """Python takes memory unseen: a module that each rank imports anew, or blocks that are free in shared pages."""
    most = defaultdict[str, float](float)
    for process in psutil.Process(job.process.pid).children(recursive=True):
        kind = process.name().removeprefix("eg-").split("-")[0]
        most[kind] = max(most[kind], private_dirty(process.pid) / 1e6)
    assert {kind: mb for kind, mb in most.items() if mb > _MOST_MB.get(kind, 0)} == {}
    assert sorted(most) == sorted(_MOST_MB)


@pytest.mark.timeout(240)
def test_the_agent_of_a_running_job_has_no_torch(job: Job) -> None:
    """Through a restart too. A rank has torch, so that the test can tell."""
    (job.directory / "go").touch()
    psutil.Process(job.rank_pid(1)).kill()
    job.expect("entered", local_rank=1, count=2)
    agent = job.process.pid
    assert with_libraries(job.rank_pid(0)) != []
    assert with_libraries(agent) == []
    assert psutil.Process(agent).memory_info().rss < _MOST_RSS_BYTES
    listening = [each for each in job.coordinator().net_connections() if each.status == psutil.CONN_LISTEN]
    assert len(listening) == 1  # for sessions: rendezvous keys go by them


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["run", "--help"], ["run", "no-such-script.py"]])
def test_a_short_answer_imports_neither_torch_nor_asyncio(arguments: list[str]) -> None:
    program = (
        "import json, runpy, sys; sys.argv[1:] = json.loads(sys.argv[1])\n"
        "try:\n    runpy.run_module('elasticgang', run_name='__main__')\n"
        "except SystemExit as end:\n    print('code', end.code or 0)\n"
        "print('modules', *sys.modules)"
    )
    command = [sys.executable, "-c", program, json.dumps(arguments)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    *_, code, modules = done.stdout.splitlines()
    assert code == ("code 2" if "no-such-script.py" in arguments else "code 0"), done.stderr
    if arguments == ["--version"]:
        assert done.stdout.startswith(f"elasticgang {version('elasticgang')}\n")
    assert {"torch", "numpy", "asyncio", "elasticgang.agent.agent"}.isdisjoint(modules.split())
    assert "elasticgang.launch.cli" in modules.split()
