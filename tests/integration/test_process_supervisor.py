"""An agent's fork server that fails while it is asked: somebody is started, once, and nothing of a failed try stays."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import Command


def outcome(directory: Path, *case: str, prefix: Sequence[str] = ()) -> dict[str, Any]:
    with Command(directory, [*prefix, sys.executable, "-m", "tests.integration.tries", *case]) as command:
        assert command.wait() == 0, command.stderr
        command.assert_nothing_left()
        found: dict[str, Any] = json.loads(command.stdout)
        return found


# SUPERVISOR-1, SUPERVISOR-5, FORK-4
def test_an_unresponsive_fork_server_is_told_of_and_replaced(tmp_path: Path) -> None:
    told = "waiting for the fork server (pid PID), which is stopped: no rank can be started meanwhile"
    assert outcome(tmp_path, "stopped") == {"tries": 2, "servers": 2, "runs": True, "told": [told]}


# SUPERVISOR-5
def test_a_fork_server_that_imports_for_long_is_told_of(tmp_path: Path) -> None:
    assert outcome(tmp_path, "stopped at first") == {"told": 1, "runs": True}


# LAUNCH-1
def test_a_launch_whose_answer_was_lost_leaves_no_rank(tmp_path: Path) -> None:
    found = outcome(tmp_path, "twin", str(tmp_path / "script.py"))
    assert found == {"tries": 2, "twin lives": False, "runs": True}


# SUPERVISOR-3
def test_orphans_are_reaped_on_a_timer(tmp_path: Path) -> None:
    assert outcome(tmp_path, "orphan") == {"is unreaped at first": True}


# SUPERVISOR-3
def test_an_orphan_that_ends_while_something_is_forked_is_reaped(tmp_path: Path) -> None:
    assert outcome(tmp_path, "orphan of a fork") == {"is unreaped at first": True}


# SUPERVISOR-4
def test_the_end_leaves_alone_what_was_there_before(tmp_path: Path) -> None:
    assert outcome(tmp_path, "earlier") == {"earlier": -signal.SIGTERM, "later": False}


# SUPERVISOR-4
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and `setpriv`")
def test_a_child_that_may_not_be_killed_spares_no_other(tmp_path: Path) -> None:
    found = outcome(tmp_path, "foreign", prefix=["setpriv", "--bounding-set", "-kill"])
    assert found == {"foreign": 0, "own": False, "spun": False}


# SUPERVISOR-3
def test_a_dead_fork_server_is_replaced_at_once(tmp_path: Path) -> None:
    found = outcome(tmp_path, "server")
    assert found == {"is unreaped at first": False, "tries": 1, "another": True}


def test_no_fork_server_starts_after_the_end(tmp_path: Path) -> None:
    assert outcome(tmp_path, "after the end") == {}
