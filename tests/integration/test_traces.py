"""Generation changes as OpenTelemetry spans."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from elasticgang.errors import OperationalError
from elasticgang.watch import traces as traces_module
from elasticgang.watch.reader import JobReader
from elasticgang.watch.serving import serve, wants_traces
from elasticgang.watch.traces import Traces, make_exporter, trace_id
from tests.support import DEADLINE_S, wait_until
from tests.unit.test_summary import RUNS, STARTED, change, event

PHASES = {"leave": 10.0, "abort": 5.0, "configure": 100.0, "heal": 400.0, "first_commit": 500.0, "resolve": None}
KILLED = {
    **change(20.2, 2, "killed", 0.25),
    "cause": "rank 1 was killed by SIGKILL",
    "digest": "d",
    "committed": [8, 1],
    "began_at": 20.0,
    "phases_ms": PHASES,
}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the traces waits for their thread, however late that gets a core."""
    monkeypatch.setattr(traces_module, "FLUSH_S", DEADLINE_S)


def exported(events: Sequence[dict[str, Any]]) -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    traces = Traces(exporter)
    for each in events:
        traces.add(each)
    traces.close()
    return list(exporter.get_finished_spans())


def names(spans: list[ReadableSpan]) -> list[str]:
    return sorted(span.name for span in spans)


def test_the_phases_are_children_of_their_change() -> None:
    spans = {span.name: span for span in exported([*STARTED, KILLED])}
    whole = spans.pop("generation change")
    assert whole.parent is None
    assert names(list(spans.values())) == ["abort", "configure", "first_commit", "heal", "leave"]
    assert all(span.parent == whole.context for span in spans.values())
    wall = 1_000_000.0  # of the clock's zero
    times = {
        name: tuple(round(at / 1e9 - wall, 3) for at in (span.start_time or 0, span.end_time or 0))
        for name, span in [*spans.items(), ("whole", whole)]
    }
    assert times == {
        "leave": (20.0, 20.01),
        "abort": (20.01, 20.015),
        "configure": (20.015, 20.115),
        "heal": (20.115, 20.515),
        "first_commit": (20.115, 20.615),
        "whole": (20.0, 20.615),
    }
    assert dict(whole.attributes or {}) == {
        "elasticgang.job.id": "demo",
        "elasticgang.agent.id": "h-1",
        "elasticgang.generation": 2,
        "elasticgang.cause": "killed",
        "elasticgang.cause.description": "rank 1 was killed by SIGKILL",
        "elasticgang.planned": False,
        "elasticgang.committed_steps": 8,
        "elasticgang.lost_seconds": 0.25,
        "elasticgang.members.left": 1,
        "elasticgang.members.joined": 0,
        "elasticgang.members.moved": 0,
    }
    assert (whole.resource.attributes["service.name"], whole.resource.attributes["host.name"]) == ("elasticgang", "h")


# TRACES-1
def test_agents_share_the_trace_of_a_change_and_of_no_other() -> None:
    def traces_of(digest: str, agent: str = "h-1", job: str = "demo", generation: int = 2) -> set[int]:
        started = event(10.0, "started", agent=agent, job=job, host="h", pid=7, ranks=2, monotonic=8.0)
        spans = exported([started, {**KILLED, "digest": digest, "generation": generation}])
        return {span.context.trace_id for span in spans if span.context is not None}

    assert len(traces_of("d")) == 1
    assert traces_of("d") == traces_of("d", agent="k-1")
    assert traces_of("d").isdisjoint(traces_of("e") | traces_of("d", job="other") | traces_of("d", generation=3))


def test_a_change_that_took_no_phase_is_a_span_without_children() -> None:
    begun = {**KILLED, "phases_ms": dict.fromkeys(PHASES)}
    assert names(exported([*STARTED, begun])) == ["generation change"]
    assert names(exported([*STARTED, {**begun, "began_at": None}])) == ["generation change"]


def test_variables_of_opentelemetry_change_the_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "pretraining")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=a")
    found = exported([*STARTED, KILLED])[0].resource.attributes
    assert (found["service.name"], found["team"]) == ("pretraining", "a")


def test_other_events_give_no_spans() -> None:
    assert exported(RUNS[:-1]) == []


class Stuck(SpanExporter):
    """Its export does not return before `released`."""

    def __init__(self) -> None:
        self.entered, self.released = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.entered.set()
        self.released.wait()
        return SpanExportResult.SUCCESS


# TRACES-2
def test_an_exporter_that_hangs_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces_module, "FLUSH_S", 0.1)
    exporter = Stuck()
    traces = Traces(exporter)
    try:
        for each in [*STARTED, *[{**KILLED, "generation": number} for number in range(2, 50)]]:
            traces.add(each)
        traces.close()
        assert exporter.entered.wait(DEADLINE_S)
        traces.add(KILLED)
    finally:
        exporter.released.set()


def test_no_thread_is_left_once_it_is_closed() -> None:
    """In a child that is forked later, it would be started again, and take the child's signals."""
    before = set(threading.enumerate())
    assert len(exported([*STARTED, KILLED])) > 1
    wait_until(lambda: set(threading.enumerate()) <= before, "the end of its threads")


def test_what_earlier_jobs_have_left_in_the_file_is_not_exported(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = [json.dumps(each) + "\n" for each in (*STARTED, KILLED)]
    path.write_text("".join(lines))
    exporter = InMemorySpanExporter()
    traces = Traces(exporter)
    reader = JobReader(path, lambda: True, pytest.fail, traces.add, path.stat().st_size)
    assert reader.read()["num_changes"] == {}
    with path.open("a") as file:
        file.write("".join(lines))
    assert reader.read()["num_changes"] == {"killed": 1}
    traces.close()
    assert names(list(exporter.get_finished_spans())).count("generation change") == 1


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x"}, False),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://h"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://h"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h"}, True),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
    ],
)
def test_traces_are_off_without_their_variables(variables: dict[str, str], wanted: bool) -> None:
    assert wants_traces(variables) == wanted


def test_an_exporter_that_is_not_installed_is_named() -> None:
    assert type(make_exporter({"OTEL_TRACES_EXPORTER": "console"})).__name__ == "ConsoleSpanExporter"
    assert type(make_exporter({})).__name__ == "OTLPSpanExporter"
    for variables, name in (
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "zipkin"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "avian"}, "otlp over avian"),
    ):
        with pytest.raises(OperationalError, match=f"no exporter '{name}'"):
            make_exporter(variables)


def test_a_collector_over_grpc_gets_the_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gRPC server with OpenTelemetry's own service, and the process that exports for an agent."""
    grpc: Any = pytest.importorskip("grpc")
    service: Any = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc")
    messages: Any = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    received: queue.SimpleQueue[Any] = queue.SimpleQueue()

    class Collector(service.TraceServiceServicer):  # type: ignore[misc]
        def Export(self, request: Any, context: Any) -> Any:  # gRPC's name
            received.put(request)
            return messages.ExportTraceServiceResponse()

    threads = ThreadPoolExecutor(2)
    server = grpc.server(threads)
    service.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        (tmp_path / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (*STARTED, KILLED)))
        names: list[str] = []
        with serve({}, str(tmp_path), traces=True):
            while len(names) < 6:
                request = received.get(timeout=DEADLINE_S)
                spans = [
                    span
                    for resource in request.resource_spans
                    for scope in resource.scope_spans
                    for span in scope.spans
                ]
                names += [span.name for span in spans]
                assert {int.from_bytes(span.trace_id, "big") for span in spans} == {trace_id("demo", 2, "d")}
        assert sorted(names) == ["abort", "configure", "first_commit", "generation change", "heal", "leave"]
    finally:
        server.stop(None).wait()
        threads.shutdown()


def test_the_tests_do_not_depend_on_the_variables_of_whoever_runs_them() -> None:
    program = "import os, tests.conftest; print([name for name in os.environ if name.startswith('OTEL_')])"
    environ = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_TRACES_EXPORTER": "otlp"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
