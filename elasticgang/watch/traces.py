"""Generation changes as OpenTelemetry traces. It needs `pip install 'elasticgang[otel]'`.

OpenTelemetry's own environment variables select the exporter, the sampler and the resource.

TRACES-1  All agents give the spans of a change the same trace id, from what all of them know: the job, the generation
    and its record's digest.
TRACES-2  Spans are exported by a thread of their own, from a bounded queue. Nothing waits for it: at the end of the
    process, no longer than `FLUSH_S`.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import threading
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from elasticgang.errors import OperationalError
from elasticgang.observe.change_report import PHASES, is_planned

FLUSH_S = 2.0
_PROTOCOLS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
_PACKAGES = {
    "otlp_proto_http": "'elasticgang[otel]'",
    "otlp_proto_grpc": "opentelemetry-exporter-otlp-proto-grpc",
}
_AFTER_CONFIGURE = PHASES[PHASES.index("configure") + 1 :]  # these begin together


def make_exporter(environ: Mapping[str, str]) -> SpanExporter:
    """The exporter that the environment selects.

    Raises:
        OperationalError: it is not installed, or cannot be made.
    """
    name = environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if name == "otlp":
        protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        name = _PROTOCOLS.get(protocol or "http/protobuf", f"otlp over {protocol}")
    found = list(entry_points(group="opentelemetry_traces_exporter", name=name))
    if not found:
        known = _PACKAGES.get(name)
        hint = f"pip install {known}" if known else "is its package installed?"
        raise OperationalError(f"there is no exporter {name!r} of OpenTelemetry traces: {hint}")
    try:
        exporter: SpanExporter = found[0].load()()
    except Exception as exc:
        raise OperationalError(f"the exporter {name!r} of OpenTelemetry traces cannot be made: {exc}") from exc
    return exporter


class Traces:
    """Exports the changes of one job; `add` every event in order. `exporter`: closed with this."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._ids = _ChosenTraceId()
        self._provider: TracerProvider | None = None
        self._job: Mapping[str, str] = {}

    def add(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "started":
            self._start(event)
        elif event["event"] == "generation_change" and self._provider is not None:
            self._trace(event, self._provider.get_tracer("elasticgang"))

    def close(self) -> None:
        """TRACES-2."""
        if self._provider is not None:  # its thread would otherwise run on, and again in each forked child
            ending = threading.Thread(target=self._provider.shutdown, daemon=True)  # exports what is left
            ending.start()
            ending.join(FLUSH_S)

    def _start(self, started: Mapping[str, Any]) -> None:
        self._job = {"elasticgang.job.id": started["job"], "elasticgang.agent.id": started["agent"]}
        if self._provider is None:
            named = Resource.create({"service.name": "elasticgang", "host.name": started["host"]})
            resource = named.merge(OTELResourceDetector().detect())
            self._provider = TracerProvider(resource=resource, shutdown_on_exit=False, id_generator=self._ids)
            self._provider.add_span_processor(BatchSpanProcessor(self._exporter))

    def _trace(self, change: Mapping[str, Any], tracer: trace.Tracer) -> None:
        self._ids.trace_id = trace_id(self._job["elasticgang.job.id"], change["generation"], change["digest"])
        phases = list(spans_of(change))
        began_s = change["t"] if change["began_at"] is None else change["began_at"]
        wall_s = change["wall"] - change["t"]
        whole = tracer.start_span(
            "generation change", Context(), attributes=self._attributes(change), start_time=_ns(began_s + wall_s)
        )
        within = trace.set_span_in_context(whole, Context())
        for name, start_s, end_s in phases:
            tracer.start_span(name, within, start_time=_ns(start_s + wall_s)).end(_ns(end_s + wall_s))
        whole.end(_ns(max([began_s, *(end_s for _, _, end_s in phases)]) + wall_s))

    def _attributes(self, change: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
        return {
            **self._job,
            "elasticgang.generation": change["generation"],
            "elasticgang.cause": change["kind"],
            "elasticgang.cause.description": change["cause"],
            "elasticgang.planned": is_planned(change),
            "elasticgang.committed_steps": change["committed"][0],
            "elasticgang.lost_seconds": change["lost_s"],
            **{f"elasticgang.members.{what}": len(change[what]) for what in ("left", "joined", "moved")},
        }


def trace_id(job: str, generation: int, digest: str) -> int:
    """TRACES-1."""
    text = f"{job}/{generation}/{digest}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "big")


def spans_of(change: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    """The phases that took place: name, beginning and end, as CLOCK_MONOTONIC seconds."""
    at_s = change["began_at"]
    for name, ms in change["phases_ms"].items():
        if ms is not None:
            yield name, at_s, at_s + ms / 1e3
            if name not in _AFTER_CONFIGURE:
                at_s += ms / 1e3


def show_first_failure() -> None:
    """Print the first thing that OpenTelemetry logs, such as a receiver that cannot be reached, and no other."""
    logging.getLogger("opentelemetry").handlers[:] = [_FirstFailure(logging.WARNING)]
    logging.getLogger("opentelemetry").propagate = False


class _FirstFailure(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        self.setLevel(logging.CRITICAL + 1)
        print(f"elasticgang: warning: traces: {record.getMessage()}", file=sys.stderr, flush=True)


class _ChosenTraceId(RandomIdGenerator):
    trace_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
