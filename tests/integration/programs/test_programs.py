"""Programs of the kind users write give over elasticgang's groups what they give over plain Gloo: under torchrun with a
gang, with the backend "elasticgang", under `elasticgang run`, and there after a rank was killed and when it is back."""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.exhaustive import IS_EXHAUSTIVE, exhaustive
from tests.integration.programs.catalog import MODULES, TOPICS, Program
from tests.integration.programs.changes import FOUR, THREE
from tests.integration.programs.outcomes import JOB, Outcomes, differences
from tests.integration.programs.runner import Outcome, read
from tests.support import REPOSITORY, Command

# One process imports torch and forks four ranks, or four ranks import all of torch.distributed, on what is left of the
# machine; a mode that has a defect takes the time-outs beside.
pytestmark = pytest.mark.timeout(900)
CHANGES = str(REPOSITORY / "tests" / "integration" / "programs" / "changes.py")
CHANGES_DEADLINE_S = 300.0
LISTING = str(REPOSITORY / "tests" / "integration" / "programs" / "listing.py")
NO_ERROR = Outcome({})
# Without ELASTICGANG_EXHAUSTIVE=1. The other programs use the collectives of these.
CALLS = ("collectives", "ddp", "groups", "messages")
TOPICS_OF = {"gloo-gang": (), "backend": CALLS, "run": (*CALLS, "compiled", "pipelines", "sharding")}
MODES_AND_TOPICS = [
    pytest.param(mode, topic, marks=[] if topic in topics else exhaustive)
    for mode, topics in TOPICS_OF.items()
    for topic in TOPICS
]

Given = Callable[..., dict[str, list[Outcome | None]]]


@functools.cache
def programs() -> dict[str, Program]:
    """Of another process, so that this one does not import what they use: they do nothing here."""
    with tempfile.TemporaryDirectory() as directory:
        command_line = [sys.executable, LISTING]
        with Command(Path(directory), command_line, preloaded=True, imports=MODULES, ends_at_once=True) as command:
            assert command.wait() == 0, command.stderr
            return {facts["name"]: Program(**facts, function=dict) for facts in json.loads(command.stdout)}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    """What the programs gave, by name: of a mode, on so many ranks. Each is run once."""

    @functools.cache
    def run(mode: str, size: int) -> Outcomes:
        topics = TOPICS if IS_EXHAUSTIVE else TOPICS_OF.get(mode, TOPICS)
        names = [
            name for name, program in programs().items() if program.topic in topics and (size == 4 or program.any_size)
        ]
        return Outcomes(mode, names, size, tmp_path_factory.mktemp(f"{mode}-{size}"))

    def of(mode: str, size: int = 4) -> dict[str, list[Outcome | None]]:
        outcomes = run(mode, size)
        assert not outcomes.failure, outcomes.failure
        return outcomes.by_name

    return of


def assert_same(
    found: dict[str, list[Outcome | None]], gloo: dict[str, list[Outcome | None]], *, over_gloo: bool = False
) -> None:
    """`over_gloo`: so that what Gloo refuses is refused."""
    lines = []
    for name, outcomes in found.items():
        program, expected = programs()[name], gloo[name]
        if program.beyond_gloo and not over_gloo:
            assert all(outcome is not None and outcome.error for outcome in expected), f"Gloo does not refuse {name}"
            expected = [NO_ERROR] * len(expected)
        lines += [f"{name}, {line}" for line in differences(outcomes, expected, program.rtol)]
    assert not lines, "\n" + "\n".join(lines)


@pytest.mark.parametrize(("mode", "topic"), MODES_AND_TOPICS)
def test_programs_give_what_they_give_over_gloo(mode: str, topic: str, given: Given) -> None:
    mine = {name: outcomes for name, outcomes in given(mode).items() if programs()[name].topic == topic}
    assert mine
    assert_same(mine, given("gloo"), over_gloo=mode == "gloo-gang")


@pytest.mark.parametrize("topic", TOPICS)
def test_gloo_refuses_a_program_on_every_rank_or_on_none(topic: str, given: Given) -> None:
    """A program that fails by itself on some rank shows nothing."""
    for name, outcomes in given("gloo").items():
        if programs()[name].topic == topic:
            assert len({bool(outcome and outcome.error) for outcome in outcomes}) == 1, name


@pytest.fixture(scope="module")
def changes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a job wrote that lost a rank, which came back."""
    output = tmp_path_factory.mktemp("changes")
    for part in (THREE, FOUR):
        (output / part).mkdir()
    command_line = [sys.executable, *JOB, "4", CHANGES, "--output", str(output)]
    with Command(output / "job", command_line, preloaded=True, imports=MODULES) as command:
        code = command.wait(CHANGES_DEADLINE_S)
        assert code == 0, command.stderr[-4000:]
    return output


def test_groups_of_a_former_generation_raise_on_every_rank(changes: Path) -> None:
    for rank in range(3):
        found = json.loads((changes / f"stale-{rank}.json").read_text())
        assert found
        assert [call for call, raised in found.items() if not raised] == [], f"rank {rank}"


@pytest.mark.parametrize(("part", "size"), [pytest.param(THREE, 3, marks=exhaustive), (FOUR, 4)])
def test_programs_run_as_before_after_a_change(part: str, size: int, changes: Path, given: Given) -> None:
    gloo = given("gloo", size)
    found = {
        name: [read(changes / part, name, rank) for rank in range(size)]
        for name, program in programs().items()
        if program.any_size
    }
    assert found
    assert_same(found, gloo)
