"""What a job does, as Prometheus metrics. It needs `pip install 'elasticgang[metrics]'`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from elasticgang.observe.change_report import CAUSES, PHASES
from elasticgang.observe.event_names import DATA_WORKER_LOSSES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # what `generate_latest` writes


def exposition(read: Callable[[], Mapping[str, Any]]) -> Callable[[], bytes]:
    """A function that returns the metrics as text. `read` returns what `Summary.report` does."""
    registry = CollectorRegistry()
    registry.register(_JobCollector(read))
    return lambda: bytes(generate_latest(registry))


class _JobCollector(Collector):
    def __init__(self, read: Callable[[], Mapping[str, Any]]) -> None:
        self._read = read

    def describe(self) -> Iterator[Metric]:
        """Nothing: so that the registration does not read."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        status = self._read()
        names = {"job_id": status["job"] or "", "agent": status["agent"] or "", "host": status["host"] or ""}
        yield InfoMetricFamily("elasticgang_job", "The job and its agent on this host.", value=names)
        yield from _of_job(status)
        yield from _of_changes(status)
        healed = "Bytes of training state that ranks of this host have received from peers."
        yield CounterMetricFamily("elasticgang_healing_received_bytes", healed, value=status["healed_bytes"])
        text = "Data workers of this host's ranks that were lost, by kind. Each is replaced."
        workers = CounterMetricFamily("elasticgang_data_workers_lost", text, labels=["kind"])
        for kind in DATA_WORKER_LOSSES:
            workers.add_metric([kind], status["data_workers_lost"][kind])
        yield workers
        faults = status["device_faults"]
        text = "Faults of this host's devices."
        num_faults = sum(fault["num_faults"] for fault in faults)
        yield CounterMetricFamily("elasticgang_device_faults", text, value=num_faults)
        text = "Devices of this host that are quarantined after faults."
        num_quarantined = sum(fault["is_quarantined"] for fault in faults)
        yield GaugeMetricFamily("elasticgang_quarantined_devices", text, value=num_quarantined)
        reported = GaugeMetricFamily(
            "elasticgang_reported",
            "The mean over this host's ranks of a number that the script reports.",
            labels=["name"],
        )
        for name, value in status["numbers"].items():
            reported.add_metric([name], float(value))
        yield reported


def _of_job(status: Mapping[str, Any]) -> Iterator[Metric]:
    yield GaugeMetricFamily("elasticgang_generation", "The present generation.", value=status["generation"])
    seats = GaugeMetricFamily("elasticgang_seats", "Seats of the present generation.", labels=["status"])
    for name, count in status["seats"].items():
        seats.add_metric([name], count)
    yield seats
    text = "Steps that the job has committed. It falls when the job goes back to a checkpoint."
    yield GaugeMetricFamily("elasticgang_committed_steps", text, value=status["step"])
    for name, text in (
        ("steps_per_s", "Committed steps a second, over the last steps."),
        ("tokens_per_s", "Tokens a second of this host's ranks, as reported by the script."),
    ):
        if status[name] is not None:
            yield GaugeMetricFamily(f"elasticgang_{name.replace('_s', '_second')}", text, value=status[name])
    if status["last_commit_age_s"] is not None:
        text = "Seconds since a step was committed."
        yield GaugeMetricFamily("elasticgang_last_commit_age_seconds", text, value=status["last_commit_age_s"])
    if status["checkpoint"] is not None:
        text = "The step of the newest complete checkpoint."
        yield GaugeMetricFamily("elasticgang_checkpoint_step", text, value=status["checkpoint"]["step"])
    text = "The part of the job's time that was not lost to its start and to generation changes."
    yield GaugeMetricFamily("elasticgang_goodput_ratio", text, value=_or_nan(status["goodput"]))


def _of_changes(status: Mapping[str, Any]) -> Iterator[Metric]:
    """One value for every cause and phase from the start on, as rates need it."""
    changes = CounterMetricFamily("elasticgang_generation_changes", "Generation changes by cause.", labels=["cause"])
    text = "Seconds lost by generation changes that are over, by cause."
    lost = CounterMetricFamily("elasticgang_lost_seconds", text, labels=["cause"])
    for cause in CAUSES:
        changes.add_metric([cause], status["num_changes"].get(cause, 0))
        lost.add_metric([cause], status["lost_s"].get(cause, 0.0))
    text = "Seconds that the generation change under way has lost so far. Goodput counts them with the lost seconds."
    under_way = GaugeMetricFamily(
        "elasticgang_generation_change_under_way_seconds", text, value=status["lost_s"].get("under_way", 0.0)
    )
    phases = CounterMetricFamily(
        "elasticgang_generation_change_phase_seconds", "Seconds in each phase of generation changes.", labels=["phase"]
    )
    for phase in PHASES:
        phases.add_metric([phase], status["phase_s"].get(phase, 0.0))
    yield from (changes, lost, under_way, phases)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
