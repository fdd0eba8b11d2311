"""A rank that begins to exit is lost at once, and restarted once it is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.training_scripts import training
from tests.support import Job

HELD_BYTES = 3 << 29
MOST_KILLS = 4


# RANK-3
@pytest.mark.alone
def test_the_others_go_on_before_the_memory_of_a_killed_rank_is_freed(tmp_path: Path) -> None:
    """Several deaths: the kernel may free the memory of one while a machine that stands still keeps the others from
    going on. Each comes before the job's end: the others wait for the rank to be back."""
    setup = f"""
        number = len(list(here.glob("killed-*")))
        is_victim = rank == 1 and number < {MOST_KILLS}
        held = torch.ones({HELD_BYTES} if is_victim else 0, dtype=torch.uint8)
        seen = []
    """
    body = f"""
                seen.append(step.index)
                while (
                    step.index >= 20
                    and len(list(here.glob("killed-*"))) < {MOST_KILLS}
                    and not (manager.num_members == 3 or manager.join_noticed or manager.poisoned)
                ):
                    time.sleep(0.01)
                if is_victim and len(seen) == 5:
                    (here / f"killed-{{number}}").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.01)
    """
    with Job(tmp_path, training(tmp_path, steps=150, setup=setup, body=body), ranks=3) as job:
        assert job.wait() == 0, job.stderr
    events = job.events()
    changes = {member: e for e in events if e["event"] == "generation_change" for member in e["left"]}
    deaths = [event for event in events if event["event"] == "exit_began" and event["member"] in changes]
    assert deaths  # not one for each kill: an agent that stands still finds that a rank is gone already
    went_on_first = 0
    for began in deaths:
        (gone,) = (event for event in events if event["event"] == "exited" and event["member"] == began["member"])
        assert gone["status"] == -9
        change = changes[began["member"]]
        assert change["cause"] == "rank 1 was killed by SIGKILL"
        begun, left = events.index(began), events.index(gone)
        next_generation = next(i for i, e in enumerate(events) if e.get("generation") == change["generation"])
        spawned = [i for i, e in enumerate(events) if e["event"] == "spawned" and i > begun]
        assert begun < min(left, next_generation)
        assert all(left < at for at in spawned)
        went_on_first += next_generation < left
    assert len(list(tmp_path.glob("killed-*"))) == MOST_KILLS
    assert went_on_first


# DEATH-3
def test_a_rank_that_executes_another_program_is_killed_and_restarted(tmp_path: Path) -> None:
    body = """
                if rank == 1 and step.index == 5 and not (here / "executed").exists():
                    (here / "executed").touch()
                    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"])
                while step.index == 20 and not (manager.num_members == 2 or manager.join_noticed or manager.poisoned):
                    time.sleep(0.01)  # the job does not end before the rank is back
    """
    with Job(tmp_path, training(tmp_path, steps=40, body=body), ranks=2) as job:
        assert job.wait() == 0, job.stderr
    exits = [event["status"] for event in job.events() if event["event"] == "exited"]
    assert sorted(exits) == [-9, 0, 0]
