"""Jobs that take another layout while their ranks cannot fill the first one, and the first one again later."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.chaos.reshaping import HeldJob, loads
from tests.chaos.resumed_sharded_job import assembled
from tests.chaos.several import SLOW_S
from tests.exhaustive import exhaustive
from tests.support import REPOSITORY, Job, kill

pytestmark = pytest.mark.timeout(600)

SCRIPT = REPOSITORY / "tests" / "chaos" / "reshaped_job.py"
STEPS, HOLD, HOLD_AGAIN, EVERY = 24, 8, 16, 5
TOLERANCE = 1e-9  # of sums of doubles in another order, over 24 steps of AdamW

PAIR_ELSE_ONE = [{"sdp": 2}, {"sdp": 1}]
TWO_PAIRS_ELSE_ONES = [{"sdp": 2, "min_replicas": 2}, {"sdp": 1}]


class Reshaped(HeldJob):
    """Agents of `reshaped_job.py`."""

    def __init__(self, directory: Path, layouts: list[dict[str, int]], every: int = 0) -> None:
        super().__init__(directory, SCRIPT, json.dumps(layouts), STEPS, every)

    def check(self, *agents: Job, ranks: int, late: int = 0) -> None:
        """They end well, and what they have is what an undisturbed rank has, but for the order of summation. `late`: so
        many ranks more may have come back before the end."""
        for agent in agents:
            assert agent.wait(SLOW_S) == 0, agent.stderr
            agent.assert_nothing_left()
        wanted, wanted_losses = alone()
        found = results(self.directory)
        assert ranks <= len(found) <= ranks + late
        assert all(each == found[0] for each in found)
        assert found[0].keys() == wanted.keys()
        for name, values in wanted.items():
            assert found[0][name] == pytest.approx(values, rel=TOLERANCE, abs=TOLERANCE), name
        losses = {step: loss for step, _, loss, _ in steps(self.directory)}
        assert losses.keys() == wanted_losses.keys()
        for step, _, loss, _ in steps(self.directory):
            assert loss == pytest.approx(wanted_losses[step], rel=TOLERANCE), step

    def sizes(self) -> list[int]:
        """`sdp` in force in each generation that has committed a step, without repetition."""
        by_generation = {generation: sdp for _, generation, _, sdp in steps(self.directory)}
        return [sdp for sdp, _ in itertools.groupby(by_generation[number] for number in sorted(by_generation))]


def results(directory: Path) -> list[dict[str, list[float]]]:
    return assembled([json.loads(path.read_text()) for path in sorted(directory.glob("done-*"))])


def steps(directory: Path) -> Iterator[tuple[int, int, float, int]]:
    """Each committed step, the generation, its loss, and `sdp` then, as each rank says."""
    for path in directory.glob("steps-*"):
        for line in path.read_text().splitlines():
            step, loss, sdp, generation = line.split()
            yield int(step), int(generation), float(loss), int(sdp)


@cache
def alone() -> tuple[dict[str, list[float]], dict[int, float]]:
    """What one undisturbed rank leaves."""
    with TemporaryDirectory() as name:
        directory = Path(name)
        with Job(directory / "alone", SCRIPT, name, json.dumps([{"sdp": 1}]), str(STEPS), "0", ranks=1) as running:
            assert running.wait() == 0, running.stderr
        (result,) = results(directory)
        return result, {step: loss for step, _, loss, _ in steps(directory)}


def test_a_lost_host_changes_the_layout_and_a_new_one_changes_it_back_in_memory(tmp_path: Path) -> None:
    """Two pairs lose one rank of four: three hold a whole copy among them, which each of them then has."""
    with Reshaped(tmp_path, TWO_PAIRS_ELSE_ONES) as job:
        first = job.lose_the_second_host(3, step=HOLD)
        job.hold(HOLD_AGAIN)
        job.reached(HOLD_AGAIN, 3)
        third = job.start(1)
        job.join_noticed(HOLD_AGAIN, 3)
        job.release()
        job.check(first, third, ranks=4)
        assert job.sizes() == [2, 1, 2]
        assert not loads(job.agents)


def test_a_lost_shard_comes_back_from_the_checkpoint_in_another_layout(tmp_path: Path) -> None:
    with Reshaped(tmp_path, PAIR_ELSE_ONE, EVERY) as job:
        first = job.lose_the_second_host(1, step=HOLD)
        job.hold(HOLD_AGAIN)
        job.reached(HOLD_AGAIN, 1)
        first.expect_line("loaded the checkpoint")
        third = job.start(1)
        job.join_noticed(HOLD_AGAIN, 1)
        job.release()
        job.check(first, third, ranks=2)
        assert job.sizes() == [2, 1, 2]
        assert not loads([third])


def test_a_rank_that_leaves_hands_its_shard_over(tmp_path: Path) -> None:
    with Reshaped(tmp_path, PAIR_ELSE_ONE) as job:
        job.hold(HOLD)
        agent = job.start(2)
        job.reached(HOLD, 2)
        (tmp_path / f"leave-{agent.rank_pid(1)}").touch()
        job.release()
        job.check(agent, ranks=1)
        assert job.sizes() == [2, 1]


@pytest.mark.parametrize("raises", [pytest.param(False, marks=exhaustive), True])
def test_a_rank_that_is_restarted_changes_no_layout(raises: bool, tmp_path: Path) -> None:
    """Two pairs of one host wait for it: with three ranks they would train otherwise. If it `raises`, the others ask
    for the next record before it has exited; otherwise it is killed."""
    with Reshaped(tmp_path, TWO_PAIRS_ELSE_ONES) as job:
        job.hold(HOLD)
        agent = job.start(4)
        job.reached(HOLD, 4)
        if raises:
            (tmp_path / f"raise-{agent.rank_pid(3)}").touch()
        else:
            kill(agent.rank_pid(3))
        job.reached(HOLD, 5)
        job.release()
        job.check(agent, ranks=4)
        assert job.sizes() == [2]
        if raises:
            assert "rank 3 exited with code 1 in step 8: restart 1 of 3" in agent.stderr


def test_a_holder_that_dies_while_the_state_moves_costs_nothing(tmp_path: Path) -> None:
    """The rank 2 of the first host is one of two that keep its shard."""
    with Reshaped(tmp_path, TWO_PAIRS_ELSE_ONES) as job:
        first = job.lose_the_second_host(3, {"DIE_MOVING": "2"}, step=HOLD)
        job.release()
        job.check(first, ranks=2, late=1)
        assert (tmp_path / "died-moving").exists()
        assert job.sizes() == [2, 1]
