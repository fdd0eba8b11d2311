"""`init_process_group("elasticgang")`: plain torch programs, with results equal to those over plain Gloo."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.support import run_preloaded

FORMS = (
    "ddp", "hsdp", "fsdp-allocates", "tp", "by-hand", "any-source", "split", "monitored-barrier", "checkpoint",
)  # fmt: skip
DEADLINE_S = 120
pytestmark = pytest.mark.timeout(2 * DEADLINE_S + 60)


def results(backend: str) -> list[dict[str, Any]]:
    """Of each rank, by form."""
    launcher = [sys.executable, "-m", "tests.integration.forked_ranks", "--train", "4"]
    command = [*launcher, "tests/integration/backend_ranks.py", "--backend", backend]
    done = run_preloaded(command, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    found: list[dict[str, Any]] = json.loads(line.removeprefix("RESULT "))
    return found


@pytest.fixture(scope="module")
def both() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    return results("gloo"), results("elasticgang")


@pytest.mark.parametrize("form", FORMS)
def test_the_results_are_those_over_gloo(form: str, both: tuple[list[dict[str, Any]], list[dict[str, Any]]]) -> None:
    for rank, (gloo, ours) in enumerate(zip(*both, strict=True)):
        assert gloo[form] == ours[form], f"rank {rank}"
        assert gloo[form]
