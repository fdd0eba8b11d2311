"""Children that a rank's script forks, such as the workers of a DataLoader."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.chaos.training_scripts import training
from tests.support import Job

# Of the rank, and of a child that it forks: the memory files that are open, and /dev/null.
FORKING = """\
def links():
    found = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return sorted(link for link in found if link.startswith("/memfd:elasticgang-") or link == os.devnull)


def fork_once():
    own = links()
    child = os.fork()
    if child == 0:
        (here / f"child-{rank}").write_text(json.dumps([own, links()]) + "\\n")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_child_has_no_descriptor_of_the_memory_that_its_rank_shares(tmp_path: Path) -> None:
    """Not those of Python's mappings either. The rank keeps its own, and goes on."""
    setup = "import json; " + f"exec({FORKING!r})"
    body = "step.index != 1 or manager.generation > 1 or fork_once()"
    with Job(tmp_path, training(tmp_path, setup=setup, body=body), ranks=2) as job:
        assert job.wait() == 0, job.stderr
    for rank in range(2):
        own, childs = json.loads((tmp_path / f"child-{rank}").read_text())
        num_shared = 0
        for name in ("/memfd:elasticgang-page ", "/memfd:elasticgang-lease ", "/memfd:elasticgang-sums "):
            here = [link for link in own if link.startswith(name)]
            assert here, "the rank has it"
            assert not [link for link in childs if link.startswith(name)]
            num_shared += len(here)
        assert childs.count(os.devnull) == own.count(os.devnull) + num_shared, "their numbers are still taken"


def test_a_child_of_a_script_without_a_job_lets_go_too(tmp_path: Path) -> None:
    """The agent gives a rank its page and its lease before the script calls `eg.join`, if it ever does."""
    text = FORKING + "import json, pathlib, os\nhere, rank = pathlib.Path(sys.argv[1]), 0\nfork_once()\n"
    script = tmp_path / "script.py"
    script.write_text("import sys\n" + text)
    with Job(tmp_path, script, str(tmp_path), ranks=1) as job:
        job.expect("exited")
        assert job.wait() == 0, job.stderr
    own, childs = json.loads((tmp_path / "child-0").read_text())
    assert [link for link in own if "elasticgang-page" in link]
    assert not [link for link in childs if "elasticgang-page" in link or "elasticgang-lease" in link]


# DRIVER-11
@pytest.mark.parametrize("place", ["in the step", "in the loop"])
def test_a_child_that_exits_has_no_part_in_the_step_nor_in_the_loop(place: str, tmp_path: Path) -> None:
    """Its exit code is its own, and the rank goes on."""
    setup = """
        def fork():
            child = os.fork()
            if child == 0:
                sys.exit(7)
            print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    body, after = (
        ("if step.index == 1: fork()", "") if place == "in the step" else ("", "    if step.index == 1: fork()")
    )
    path = training(
        tmp_path, setup=setup, body=body, after=f"{after}\n        print('committed', manager.committed_steps)"
    )
    with Job(tmp_path, path, ranks=2) as job:
        assert job.wait() == 0, job.stderr
    assert job.stdout.count("child 7") >= 1
    assert job.stdout.count("committed 5") == 2
    assert "Traceback" not in job.stderr, job.stderr


def test_the_exception_of_a_child_is_shown(tmp_path: Path) -> None:
    setup = """
        def fork():
            child = os.fork()
            if child == 0:
                raise ValueError("in the child")
            print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    path = training(tmp_path, setup=setup, body="if rank == 1 and step.index == 1: fork()")
    with Job(tmp_path, path, ranks=2) as job:
        assert job.wait() == 0, job.stderr
    assert job.stdout.count("child 1") == job.stderr.count("ValueError: in the child") == 1
    assert "runpy" not in job.stderr
