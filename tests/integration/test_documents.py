"""The documents' blocks that need no elastic job run on real ranks."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from tests.documents import GANGS, PROCESS_GROUPS, Program, reports
from tests.support import Command, reserved_port

DEADLINE_S = 240.0
pytestmark = pytest.mark.timeout(DEADLINE_S + 60)  # processes import torch, on whatever the machine has left


def written(program: Program, directory: Path) -> str:
    script = directory / "train.py"
    script.write_text(program.script())
    return str(script)


def test_the_blocks_on_gangs_run_as_under_torchrun(tmp_path: Path) -> None:
    script = written(GANGS, tmp_path)
    command = [sys.executable, "-m", "tests.integration.forked_ranks", str(GANGS.num_ranks), script]
    with Command(tmp_path, command, env={"REPORTS": str(tmp_path)}, preloaded=True) as ranks:
        assert ranks.wait(DEADLINE_S) == 0, ranks.stderr
    assert reports(tmp_path) == [GANGS.expected] * GANGS.num_ranks


def test_the_block_on_process_groups_runs(tmp_path: Path) -> None:
    command = [sys.executable, written(PROCESS_GROUPS, tmp_path)]
    size = PROCESS_GROUPS.num_ranks
    with contextlib.ExitStack() as started:
        env = {"PORT": str(started.enter_context(reserved_port())), "REPORTS": str(tmp_path)}
        ranks = [
            started.enter_context(
                Command(tmp_path / str(rank), [*command, str(rank), str(size)], env=env, preloaded=True)
            )
            for rank in range(size)
        ]
        for rank, each in enumerate(ranks):
            assert each.wait(DEADLINE_S) == 0, each.stderr
            assert each.stdout.splitlines() == [f"rank {rank}, configuration {number}: 3.0" for number in range(3)]
    assert reports(tmp_path) == [PROCESS_GROUPS.expected] * size
