"""The server of a job's page and metrics, as its own process, over an event file."""

from __future__ import annotations

import html
import http.client
import json
import math
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elasticgang.watch import server as watch_server
from elasticgang.watch.serving import serve
from tests.support import DEADLINE_S, wait_until
from tests.unit.test_summary import RUNS, STARTED, change, event, generation

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ATTACK = "<img src=x onerror=alert(1)>"
EVENTS = [
    *RUNS,
    generation(20.1, 2, 8),
    {**change(20.2, 2, "killed", 0.25), "cause": f"rank 1 was killed by SIGKILL {ATTACK}"},
]


@contextmanager
def serving(
    directory: Path, events: list[dict[str, Any]], what: str = "page", host: str = "127.0.0.1"
) -> Iterator[int]:
    """Yield the port."""
    (directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    listener = socket.create_server((host, 0))
    port = int(listener.getsockname()[1])
    with serve({what: listener}, str(directory)):
        yield port


def request(
    port: int, path: str, method: str = "GET", *, at: str = "127.0.0.1", **headers: str
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection(at, port, timeout=DEADLINE_S)
    try:
        connection.request(method, path, body="x" * 100 if method == "POST" else None, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode(), dict(response.getheaders())
    finally:
        connection.close()


# SUMMARY-4
def test_a_page_of_recorded_events_has_the_loss(tmp_path: Path) -> None:
    reported = [event(30.0 + n, "reported", step=10 * n, numbers={"loss": 1 / n}) for n in range(1, 5)]
    with serving(tmp_path, [*EVENTS, *reported]) as port:
        found = json.loads(request(port, "/status.json")[1])
    assert found["status"]["numbers"] == {"loss": 0.25}
    points = [(step, rate, loss) for _, step, rate, loss in found["history"]]
    assert points[:4] == [(10, 0.0, 1.0), (20, 10.0, 0.5), (30, 10.0, 1 / 3), (40, 10.0, 0.25)]
    assert [point[0] for point in found["history"][:4]] == [23.0, 24.0, 25.0, 26.0]


# SERVER-2
def test_the_page_is_read_only(tmp_path: Path) -> None:
    with serving(tmp_path, EVENTS) as port:
        status, body, headers = request(port, "/status.json")
        assert (status, headers["Content-Type"]) == (200, "application/json")
        found = json.loads(body)["status"]
        assert (found["job"], found["generation"], found["num_changes"]) == ("demo", 2, {"killed": 1, "start": 1})
        for path in ("/", "/page.js", "/page.css", "/?x=1"):
            assert request(port, path)[0] == 200
        for path in (
            "/metrics",
            "/page",
            "/../server.py",
            "/page/page.html",
            "/status.json/",
            "/%2e%2e/server.py",
        ):
            assert request(port, path)[0] == 404, path
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"):
            status, _, headers = request(port, "/status.json", method)
            assert (status, headers["Allow"]) == (405, "GET, HEAD"), method
        status, body, headers = request(port, "/status.json", "HEAD")
        assert (status, body) == (200, "")
        assert int(headers["Content-Length"]) > 100
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy


# SERVER-3
def test_a_status_is_encoded_once_and_only_for_who_asks() -> None:
    class Reader:
        num_reads = 0

        def read(self) -> dict[str, Any]:
            self.num_reads += 1
            return {"elapsed_s": 1.0, "step": self.num_reads, "steps_per_s": 2.0, "numbers": {"loss": math.nan}}

    source = watch_server.StatusSource(Reader())  # type: ignore[arg-type]
    source.refresh()
    first = source.json()
    assert source.json() is first
    found = json.loads(first)
    assert (found["status"]["step"], [point[1] for point in found["history"]]) == (2, [1, 2])
    source.refresh()
    assert json.loads(source.json())["status"]["step"] == 3


# SERVER-4
def test_a_name_of_another_site_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path, EVENTS) as port:
        for host in ("localhost", f"localhost:{port}", "127.0.0.1", f"[::1]:{port}"):
            assert request(port, "/status.json", Host=host)[0] == 200, host
        for host in ("attacker.example", f"attacker.example:{port}", "127.0.0.1.attacker.example", ""):
            assert request(port, "/status.json", Host=host)[0] == 403, host


# SERVER-4
def test_any_loopback_address_refuses_the_names_of_other_sites(tmp_path: Path) -> None:
    at = "127.0.0.2"
    with serving(tmp_path, EVENTS, host=at) as port:
        for host in (at, f"{at}:{port}", "localhost"):
            assert request(port, "/status.json", at=at, Host=host)[0] == 200, host
        for host in ("attacker.example", f"attacker.example:{port}", "127.0.0.3"):
            assert request(port, "/status.json", at=at, Host=host)[0] == 403, host


# SERVER-1
def test_the_server_ends_with_its_input(tmp_path: Path) -> None:
    with serving(tmp_path, EVENTS) as port:
        assert request(port, "/")[0] == 200
    with pytest.raises(ConnectionRefusedError):
        request(port, "/")


# SERVER-3
def test_clients_that_send_nothing_do_not_keep_others_out(tmp_path: Path) -> None:
    with serving(tmp_path, EVENTS) as port:
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(2 * watch_server.MAX_CLIENTS)]
        try:
            idle[-1].settimeout(DEADLINE_S)
            assert idle[-1].recv(1) == b"", "one too many: it is dropped"
            idle[0].setblocking(False)
            with pytest.raises(BlockingIOError):
                idle[0].recv(1)  # earlier than the first one, which has time left
            wait_until(lambda: _answers(port), "an answer, once the idle clients are dropped", 30.0)
        finally:
            for each in idle:
                each.close()


@contextmanager
def serving_here() -> Iterator[int]:
    """Yield the port of a server in this process, whose only route is "/"."""
    routes = {"/": ("text/plain", lambda: b"text")}
    with watch_server.ReadOnlyServer(socket.create_server(("127.0.0.1", 0)), routes) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


# SERVER-3
def test_a_client_that_sends_slowly_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_server, "CONNECTION_S", 0.5)
    with serving_here() as port, socket.create_connection(("127.0.0.1", port)) as client:
        client.settimeout(0.05)
        deadline, is_open = time.monotonic() + DEADLINE_S, True
        while is_open:
            assert time.monotonic() < deadline, "it is still connected"
            try:
                client.send(b"x")  # much earlier than a timeout of one read
                is_open = client.recv(1) != b""
            except TimeoutError:
                continue
            except ConnectionError:
                is_open = False


# SERVER-3
def test_clients_without_a_thread_take_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with serving_here() as port:
        with monkeypatch.context() as lacking:
            lacking.setattr(threading.Thread, "start", no_thread)
            for _ in range(watch_server.MAX_CLIENTS):
                with pytest.raises((OSError, http.client.HTTPException)):
                    request(port, "/")
        assert request(port, "/")[0] == 200


def _answers(port: int) -> bool:
    try:
        return request(port, "/status.json")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def test_events_that_come_later_are_shown_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    with serving(tmp_path, RUNS) as port:
        line = json.dumps(generation(20.1, 2, 8))
        with (tmp_path / "events.jsonl").open("a") as file:
            file.write(line[:20] + "\n" + line)  # one line is cut; the next one is not ended yet
            file.flush()
            assert json.loads(request(port, "/status.json")[1])["status"]["generation"] == 1
            file.write("\n")
        wait_until(
            lambda: json.loads(request(port, "/status.json")[1])["status"]["generation"] == 2, "the next generation"
        )


@pytest.mark.parametrize(("what", "path"), [("page", "/status.json"), ("metrics", "/metrics")])
def test_a_status_that_can_no_longer_be_read_is_not_shown(tmp_path: Path, what: str, path: str) -> None:
    events = tmp_path / "events.jsonl"
    with serving(tmp_path, EVENTS, what) as port:
        assert request(port, path)[0] == 200
        events.rename(tmp_path / "aside")
        events.mkdir()  # each read fails
        wait_until(lambda: request(port, path)[0] == 503, "an error instead of the old status")
        events.rmdir()
        (tmp_path / "aside").rename(events)
        wait_until(lambda: request(port, path)[0] == 200, "the status again")


def test_metrics_are_served_on_a_port_of_their_own(tmp_path: Path) -> None:
    with serving(tmp_path, EVENTS, "metrics") as port:
        status, body, headers = request(port, "/metrics")
        assert status == 200
        assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
        families = {family.name: family for family in text_string_to_metric_families(body)}
        assert families["elasticgang_generation"].samples[0].value == 2
        assert request(port, "/")[0] == request(port, "/status.json")[0] == 404


def dom_of(port: int, directory: Path) -> str:
    """What Chromium makes of the page, as it writes it."""
    assert CHROMIUM is not None
    alone = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
    options = ["--headless", "--no-sandbox", "--disable-gpu", *alone, f"--user-data-dir={directory / 'browser'}"]
    budget = ["--virtual-time-budget=3000", "--dump-dom", f"http://127.0.0.1:{port}/"]
    return subprocess.run([CHROMIUM, *options, *budget], capture_output=True, text=True, timeout=110).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_shows_the_numbers(tmp_path: Path) -> None:
    """With the real numbers, and text that is no markup."""
    lost = event(20.3, "data_worker_lost", member="h-1/0/a", local_rank=0, kind="hung")
    with serving(tmp_path, [*EVENTS, lost]) as port:
        written = dom_of(port, tmp_path)
        status = json.loads(request(port, "/status.json")[1])["status"]
    dom = html.unescape(written)
    assert dom.count("<tr>") == 3, dom  # the heading, and two changes
    assert f"<b>{status['generation']}</b><span>generation</span>" in dom
    assert f"<b>{status['step']}</b><span>step</span>" in dom
    assert "<b>1 hung</b><span>data workers lost, this host</span>" in dom
    assert '<span id="state" class="badge running">running</span>' in dom
    assert len(re.findall(r'<i class="seat (active|learner|spare|gone)" title', dom)) == 3
    assert "killed</span>" in dom
    assert "0.25 s, 1" in dom
    assert "&lt;img src=x" in written
    assert "<img" not in written


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_shows_hosts_by_name_and_when_the_changes_were(tmp_path: Path) -> None:
    seats = [
        {"agent": f"{name}-{number:08x}{again}", "host": "10.0.0.1", "seats": [[0, number, "active"]]}
        for number, (name, again) in enumerate([("gpu-17", ""), ("gpu-18", ".2"), ("twice", ""), ("twice", ".3")])
    ]
    phases = {"leave": 2000.0, "quorum": 500.0, "heal": 1500.0, "first_commit": 2500.0}
    events = [
        *STARTED,
        {**generation(12.0, 1, 0), "seats": seats},
        {**change(13.0, 1, "start", 4.5), "phases_ms": {"quorum": 3000.0}},
        {**generation(20.0, 2, 8), "seats": seats},
        {**change(23.0, 2, "killed", 2.0), "phases_ms": phases},
    ]
    with serving(tmp_path, events) as port:
        dom = html.unescape(dom_of(port, tmp_path))
    rows = r'<div class="host"><span title="([^"]*)">([^<]*)</span>'
    assert re.findall(rows, dom) == [
        ("gpu-17-00000000 at 10.0.0.1", "gpu-17"),
        ("gpu-18-00000001.2 at 10.0.0.1", "gpu-18"),
        ("twice-00000002 at 10.0.0.1", "twice-00000002"),
        ("twice-00000003.3 at 10.0.0.1", "twice-00000003.3"),
    ]
    _, _, timeline = dom.partition('<div id="timeline">')
    *titles, newest = re.findall(r'title="([^"]*)"', timeline.partition("</div>")[0])
    assert titles == [
        "change to generation 1: cause 1, 5.0 s",  # from the agent's start on
        "training, 5.0 s",
        "change to generation 2: cause 2, 5.0 s",
    ]
    assert re.fullmatch(r"training, [\d.]+ s", newest), "until now"
    assert '<span class="number">5.0 s</span>' in dom, "the heal is a part of the time to the first commit"
    assert 'title="first commit: 2500.0 ms"' in dom
    assert '<span class="number">3.0 s</span>' in dom


def test_the_page_needs_nothing_from_elsewhere() -> None:
    page = Path(watch_server.__file__).with_name("page")
    text = "".join(path.read_text() for path in page.iterdir())
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}, "a name, never fetched"
    assert "innerHTML" not in text
    assert sys.getsizeof(text) < 40_000
