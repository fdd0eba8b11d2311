"""The documents' blocks that need no elastic job run on real ranks."""

from __future__ import annotations

import contextlib
import socket
import sys
from pathlib import Path

from tests.documents import GANGS, PROCESS_GROUPS, Program, reports
from tests.support import Command

DEADLINE_S = 90.0


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
    with socket.create_server(("127.0.0.1", 0)) as free:
        env = {"PORT": str(free.getsockname()[1]), "REPORTS": str(tmp_path)}
    with contextlib.ExitStack() as started:
        ranks = [
            started.enter_context(Command(tmp_path / str(rank), [*command, str(rank), str(size)], env=env))
            for rank in range(size)
        ]
        for rank, each in enumerate(ranks):
            assert each.wait(DEADLINE_S) == 0, each.stderr
            assert each.stdout.splitlines() == [f"rank {rank}, configuration {number}: 3.0" for number in range(3)]
    assert reports(tmp_path) == [PROCESS_GROUPS.expected] * size
