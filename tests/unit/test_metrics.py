"""The metrics of a job, and the dashboard that shows them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elasticgang.watch.metrics import exposition
from elasticgang.watch.summary import RankStatus
from tests.documents import REPOSITORY
from tests.unit.test_summary import PAGES, RUNS, STARTED, change, event, generation, report


def samples(status: dict[str, Any]) -> dict[tuple[str, tuple[str, ...]], float]:
    """By name and the values of the labels."""
    text = exposition(lambda: status)().decode()
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation for family in families)
    found = [sample for family in families for sample in family.samples]
    return {(sample.name, tuple(sample.labels.values())): sample.value for sample in found}


def test_the_metrics_are_the_numbers_of_the_summary() -> None:
    saved = event(20.0, "saved", step=8, generation=1, digest="d", path="/c", bytes=10, duration_s=0.5)
    status = report([*RUNS, saved, generation(20.1, 2, 8), change(20.2, 2, "killed", 0.1)], PAGES, 20.25)
    found = samples(status)
    assert found["elasticgang_job_info", ("h-1", "h", "demo")] == 1
    expected = {
        "elasticgang_generation": status["generation"],
        "elasticgang_committed_steps": status["step"],
        "elasticgang_steps_per_second": status["steps_per_s"],
        "elasticgang_tokens_per_second": status["tokens_per_s"],
        "elasticgang_last_commit_age_seconds": status["last_commit_age_s"],
        "elasticgang_goodput_ratio": status["goodput"],
        "elasticgang_checkpoint_step": status["checkpoint"]["step"],
        "elasticgang_healing_received_bytes_total": status["healed_bytes"],
    }
    assert {name: found[name, ()] for name in expected} == expected
    for name, key in (
        ("elasticgang_seats", "seats"),
        ("elasticgang_generation_changes_total", "num_changes"),
        ("elasticgang_lost_seconds_total", "lost_s"),
        ("elasticgang_generation_change_phase_seconds_total", "phase_s"),
        ("elasticgang_data_workers_lost_total", "data_workers_lost"),
        ("elasticgang_reported", "numbers"),
    ):
        assert status[key]
        assert {label: found[name, (label,)] for label in status[key]} == status[key]


# SUMMARY-3
@pytest.mark.parametrize("is_over", [False, True])
def test_goodput_is_what_the_lost_seconds_leave(is_over: bool) -> None:
    events = [*RUNS, generation(20.1, 2, 8), *([change(25.0, 2, "killed", 3.5)] if is_over else [])]
    status = report(events, PAGES, 25.0)
    found = samples(status)
    lost_s = sum(value for (name, _), value in found.items() if name == "elasticgang_lost_seconds_total")
    under_way_s = found["elasticgang_generation_change_under_way_seconds", ()]
    assert (under_way_s == 0) == is_over
    goodput = found["elasticgang_goodput_ratio", ()]
    assert goodput == pytest.approx(1 - (lost_s + under_way_s) / status["elapsed_s"], abs=1e-4)


def test_no_counter_falls_when_the_job_goes_back() -> None:
    """Prometheus would take that for a restart, and count the steps until then twice."""

    def counters(status: dict[str, Any]) -> dict[tuple[str, tuple[str, ...]], float]:
        families = text_string_to_metric_families(exposition(lambda: status)().decode())
        names = {sample.name for family in families if family.type == "counter" for sample in family.samples}
        return {key: value for key, value in samples(status).items() if key[0] in names}

    gone_back = [*RUNS, generation(21.0, 2, 5), change(21.2, 2, "killed", 0.5)]
    before, after = report(RUNS, PAGES, 20.25), report(gone_back, {}, 21.5)
    assert (before["step"], after["step"]) == (8, 5)
    assert len(counters(before)) > 10
    assert {key: value for key, value in counters(before).items() if counters(after)[key] < value} == {}


def test_a_job_that_starts_has_metrics_too() -> None:
    found = samples(report(STARTED, {}, 11.0))
    assert found["elasticgang_generation", ()] == 0
    assert found["elasticgang_lost_seconds_total", ("killed",)] == 0, "so that the first kill is an increase"
    assert ("elasticgang_tokens_per_second", ()) not in found


def test_device_faults_are_those_of_the_status() -> None:
    fault = {"uuid": "", "reason": "ECC", "local_rank": 0}
    faults = [
        event(19.0 + at, "device_fault", device=device, is_quarantined=at == 2, **fault)
        for at, device in enumerate((0, 1, 1))
    ]
    status = report([*RUNS, *faults], PAGES, 22.0)
    found = samples(status)
    assert (
        found["elasticgang_device_faults_total", ()] == 3 == sum(each["num_faults"] for each in status["device_faults"])
    )
    assert found["elasticgang_quarantined_devices", ()] == 1


def test_a_number_that_is_not_finite_is_exported_as_such() -> None:
    pages = {"h-1/0/a": RankStatus(8, 1, "WAITING", (), (0, 0), {"loss": (float("inf"), 0.0)})}
    assert samples(report(RUNS, pages, 20.25))["elasticgang_reported", ("loss",)] == float("inf")


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    text = (REPOSITORY / "docs" / "grafana.json").read_text()
    dashboard = json.loads(text)
    queried = {name for panel in dashboard["panels"] for query in panel["targets"] for name in _names(query["expr"])}
    assert queried == {name for name, _ in samples(report(RUNS, PAGES, 20.25))}
    assert {name for name in _names(text) if name != "elasticgang_"} == queried
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len({panel["id"] for panel in dashboard["panels"]}) == len(places)


def _names(text: str) -> list[str]:
    return re.findall(r"\belasticgang_\w+", text)
