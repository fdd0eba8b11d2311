"""TensorBoard's own reader finds the numbers of a job in what is written for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from elasticgang.watch.scalars import ScalarWriter
from tests.unit.test_summary import PAGES, RUNS, STARTED, change, generation, report


def points_of(directory: Path) -> dict[str, list[Any]]:
    """The points of each tag, in order."""
    found = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: found.Scalars(tag) for tag in found.Tags()["scalars"]}


def test_the_scalars_are_the_numbers_of_the_summary(tmp_path: Path) -> None:
    status = report([*RUNS, generation(20.1, 2, 8), change(20.2, 2, "killed", 0.1)], PAGES, 20.25)
    ScalarWriter(tmp_path / "a" / "job").add(status)
    found = points_of(tmp_path / "a" / "job")
    expected = {
        "elasticgang/generation": 2,
        "elasticgang/steps_per_second": status["steps_per_s"],
        "elasticgang/tokens_per_second": status["tokens_per_s"],
        "elasticgang/goodput_ratio": status["goodput"],
        "elasticgang/healing_received_bytes": status["healed_bytes"],
        **{f"elasticgang/seats/{name}": count for name, count in status["seats"].items()},
        **{f"elasticgang/generation_changes/{kind}": count for kind, count in status["num_changes"].items()},
        **{f"elasticgang/lost_seconds/{kind}": seconds for kind, seconds in status["lost_s"].items()},
        **{f"elasticgang/generation_change_phase_seconds/{name}": s for name, s in status["phase_s"].items()},
        **{f"elasticgang/data_workers_lost/{kind}": count for kind, count in status["data_workers_lost"].items()},
        "reported/loss": status["numbers"]["loss"],
        "reported/tokens": status["numbers"]["tokens"],
    }
    assert {tag: point.value for tag, (point,) in found.items()} == pytest.approx(expected, rel=1e-6)
    assert {point.step for (point,) in found.values()} == {status["step"]}
    assert {round(point.wall_time, 2) for (point,) in found.values()} == {round(status["wall"], 2)}


def test_a_point_is_written_for_each_step_and_each_change_that_is_seen(tmp_path: Path) -> None:
    writer = ScalarWriter(tmp_path)
    writer.add(report(STARTED, {}, 11.0))  # there is no generation yet
    writer.add(report(RUNS, {}, 20.2))
    writer.add(report(RUNS, {}, 20.4))
    changed = [*RUNS, generation(20.1, 2, 8), change(20.2, 2, "killed", 0.1)]
    writer.add(report(changed, {}, 20.4))
    writer.add(report(changed, PAGES, 20.5))
    found = points_of(tmp_path)
    assert [(point.step, point.value) for point in found["elasticgang/generation"]] == [(0, 1), (8, 2)]
    assert [point.value for point in found["elasticgang/generation_changes/start"]] == [1, 1]
    assert "elasticgang/steps_per_second" not in found, "nobody knows it without the ranks' pages"


# SCALARS-1
def test_a_directory_that_cannot_be_written_costs_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    writer = ScalarWriter(tmp_path / "file" / "job")
    for number in range(2, 5):
        writer.add(report([*RUNS, generation(20.1, number, 8)], {}, 20.2))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"elasticgang: warning: no more scalars are written to {tmp_path}/file/job: ")
