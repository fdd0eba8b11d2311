"""A rank that begins to exit is lost at once, and restarted once it is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.training_scripts import training
from tests.support import Job

HELD_BYTES = 3 << 29


# RANK-3
@pytest.mark.alone
def test_the_others_go_on_before_the_memory_of_a_killed_rank_is_freed(tmp_path: Path) -> None:
    setup = f"""
        is_victim = rank == 1 and not (here / "killed").exists()
        held = torch.ones({HELD_BYTES} if is_victim else 0, dtype=torch.uint8)
    """
    body = """
                if is_victim and step.index == 5:
                    (here / "killed").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.01)
    """
    with Job(tmp_path, training(tmp_path, steps=40, setup=setup, body=body), ranks=3) as job:
        assert job.wait() == 0, job.stderr
    events = job.events()
    (began,) = (event for event in events if event["event"] == "exit_began")
    (gone,) = (event for event in events if event["event"] == "exited" and event["member"] == began["member"])
    next_generation = next(event for event in events if event.get("generation") == 2)
    restart = [event for event in events if event["event"] == "spawned" and event["local_rank"] == 1][-1]
    assert gone["status"] == -9
    assert [events.index(event) for event in (began, next_generation, gone, restart)] == sorted(
        events.index(event) for event in (began, next_generation, gone, restart)
    )
    (change,) = (event for event in events if event["event"] == "generation_change" and event["generation"] == 2)
    assert change["cause"] == "rank 1 was killed by SIGKILL"


# DEATH-3
def test_a_rank_that_executes_another_program_is_killed_and_restarted(tmp_path: Path) -> None:
    body = """
                if rank == 1 and step.index == 5 and not (here / "executed").exists():
                    (here / "executed").touch()
                    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"])
                time.sleep(0.01)
    """
    with Job(tmp_path, training(tmp_path, steps=40, body=body), ranks=2) as job:
        assert job.wait() == 0, job.stderr
    exits = [event["status"] for event in job.events() if event["event"] == "exited"]
    assert sorted(exits) == [-9, 0, 0]
