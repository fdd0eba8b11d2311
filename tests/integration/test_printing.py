"""What the commands do whose output cannot be written."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import DEADLINE_S
from tests.unit.test_summary import RUNS


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in RUNS))
    return tmp_path


@pytest.mark.parametrize("arguments", [["events"], ["events", "--json"], ["explain"], ["status"], ["status", "--json"]])
def test_a_full_disk_is_an_error_of_one_line(arguments: Sequence[str], log_dir: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "elasticgang", *arguments, str(log_dir)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S)
    assert done.stderr == "elasticgang: error: the output cannot be written: No space left on device\n"
    assert done.returncode == 1
