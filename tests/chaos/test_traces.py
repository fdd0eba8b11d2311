"""Jobs that export traces: to a receiver over HTTP, to one that never answers, and to nobody."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from elasticgang.watch.traces import trace_id
from tests.chaos.several import SLOW_S, Cluster, generation_of
from tests.chaos.test_kills import JOB, at, check
from tests.chaos.test_status import read
from tests.support import DEADLINE_S, Job, kill, wait_until

pytestmark = pytest.mark.timeout(600)

_WHOLE = "generation change"


class Receiver(ThreadingHTTPServer):
    """Keeps the spans that it receives."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []
        self.paths: set[str] = set()


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        request = ExportTraceServiceRequest()
        request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.paths.add(self.path)
        self.server.spans += [
            span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans
        ]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None: ...


@contextmanager
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


# TRACES-1
def test_agents_of_a_job_export_each_change_into_one_trace(
    tmp_path: Path, alone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # ms
    with receiver(monkeypatch) as server, Cluster(tmp_path, holds=[5, 12]) as cluster:
        agents = [cluster.start(nnodes="2:2", job_id="traced") for _ in range(2)]
        cluster.reached(5, 4)
        kill(agents[0].rank_pid(1))
        if len(generation_of(agents[0], 2)["ranks"]) == 3:  # else it is back already
            cluster.join_noticed(5, 3)
        cluster.release(5)
        cluster.reached(12, 4)

        (change, other) = (agent.expect("generation_change", generation=2) for agent in agents)
        assert change["digest"] == other["digest"]
        assert "killed" in {change["kind"], other["kind"]}

        def spans() -> list[Any]:
            id_ = trace_id("traced", 2, change["digest"])
            return [span for span in server.spans if int.from_bytes(span.trace_id, "big") == id_]

        def whole() -> dict[str, Any]:
            """By agent."""
            return {attributes(span)["elasticgang.agent.id"]: span for span in spans() if span.name == _WHOLE}

        wait_until(lambda: len(whole()) == len(agents), "the change in the trace of both agents", SLOW_S)
        for agent, seen in zip(agents, (change, other), strict=True):
            span = whole()[agent.expect("started")["agent"]]
            assert attributes(span)["elasticgang.cause"] == seen["kind"]
            phases = {child.name for child in spans() if child.parent_span_id == span.span_id}
            assert phases == {name for name, ms in seen["phases_ms"].items() if ms is not None}
        cluster.release(12)
        cluster.check(alone, agents)
    assert server.paths == {"/v1/traces"}


# SERVER-1, TRACES-2, SUPERVISOR-4
def test_what_happened_last_is_exported_at_the_end_of_the_job(
    tmp_path: Path, alone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")  # ms: nothing before the end
    faults = [at("body", 1)]
    with receiver(monkeypatch) as server:
        arguments = ["--output-dir", str(tmp_path), "--faults", json.dumps(faults), "--holds", "[25]"]
        with Job(tmp_path, JOB, *arguments, ranks=3, options=["--status-port", "0"]) as job:
            job.expect_line("the page of this job: ")
            (page,) = re.findall(r"the page of this job: (http://\S+)", job.stderr)
            assert read(page)  # the process that exports has started: the job may be quicker
            (tmp_path / "go-25").touch()
            job.wait()
            job.assert_nothing_left()
        check(job, faults, alone)
        changes = [event for event in job.events() if event["event"] == "generation_change"]
        assert len([span for span in server.spans if span.name == _WHOLE]) == len(changes) > 0


# TRACES-2
def test_a_receiver_that_never_answers_delays_no_step_and_no_end(
    tmp_path: Path, alone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:  # its kernel accepts, nobody reads
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        silent.settimeout(DEADLINE_S)
        faults = [at("body", 1), at("body", 0)]
        arguments = ["--output-dir", str(tmp_path), "--faults", json.dumps(faults), "--holds", "[25]"]
        with Job(tmp_path, JOB, *arguments, ranks=3) as job, silent.accept()[0]:  # it has tried
            (tmp_path / "go-25").touch()
            job.wait()
            job.assert_nothing_left()
        check(job, faults, alone)


def test_a_receiver_that_is_not_there_costs_one_warning(
    tmp_path: Path, alone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    faults = [at("body", 1), at("body", 0)]
    with socket.socket() as taken:  # nobody listens there, and nobody else can
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        with Job(tmp_path, JOB, "--output-dir", str(tmp_path), "--faults", json.dumps(faults), ranks=3) as job:
            job.wait()
            job.assert_nothing_left()
    check(job, faults, alone)
    assert job.stderr.count("elasticgang: warning: traces: ") <= 1
    assert "Traceback" not in job.stderr
