"""Serves the page of a job and its metrics over HTTP, and exports traces and scalars, in a process of its own: nobody
who reads or receives them costs the agent anything.

SERVER-1  It ends when its standard input does: with its agent, however that ends.
SERVER-2  It answers its own routes alone, and only GET and HEAD. A request changes nothing.
SERVER-3  What a request costs is bounded: it gets what was read last, a client loses its connection after
    `CONNECTION_S`, and one beyond `MAX_CLIENTS` at once.
SERVER-4  On a loopback address it answers only requests to its own names, so that no page of another site can read the
    status by a DNS name that points here.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticgang.errors import OperationalError
from elasticgang.process.priority import give_way
from elasticgang.process.stop_signals import ignore_stop_signals
from elasticgang.watch.history import History
from elasticgang.watch.reader import JobReader
from elasticgang.watch.registry import EVENTS

if TYPE_CHECKING:
    from elasticgang.watch.traces import Traces

_READ_S = 1.0
_LAST_READ_S = 1.0
_MAX_FAILURES = 3
_CLIENT_TIMEOUT_S = 5.0  # for one read or write
CONNECTION_S = 10.0
MAX_CLIENTS = 64
_MAX_BODY_BYTES = 1 << 16
_NICENESS = 10  # the ranks come first: they wait for each other, so that an interrupted one holds up all
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
_PAGE = Path(__file__).with_name("page")
_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

Route = tuple[str, Callable[[], bytes]]  # the type of what the function returns


class StatusUnavailable(Exception):
    """The job's files could not be read lately."""


class StatusSource:
    """What was read last (SERVER-3). `refresh` reads. After `_MAX_FAILURES` reads in a row that fail there is no
    status, nor if the first one fails. What nobody asks for is not encoded, and the same status is encoded once."""

    def __init__(self, reader: JobReader, on_status: Callable[[dict[str, Any]], None] = lambda status: None) -> None:
        """`on_status` gets each status."""
        self._reader, self._on_status = reader, on_status
        self._history = History()
        reader.on_reported = self._history.add
        self._lock = threading.Lock()
        self._num_failures = _MAX_FAILURES - 1  # the first read counts
        self.refresh()

    def refresh(self) -> None:
        try:
            status = self._reader.read()
            with self._lock:
                self._history.add(status)
                self._status, self._json = status, b""
            self._on_status(status)
        except Exception as exc:  # such as EIO, ESTALE and EMFILE, which may pass
            self._num_failures += 1
            if self._num_failures == _MAX_FAILURES:
                print(f"elasticgang: warning: the page and the metrics have no status: {exc}", file=sys.stderr)
        else:
            self._num_failures = 0

    def json(self) -> bytes:
        """Raises StatusUnavailable."""
        self._check()
        with self._lock:
            if not self._json:
                self._json = f'{{"status": {json.dumps(self._status)}, "history": {self._history.json}}}'.encode()
            return self._json

    def status(self) -> dict[str, Any]:
        """Raises StatusUnavailable."""
        self._check()
        return self._status

    def _check(self) -> None:
        if self._num_failures >= _MAX_FAILURES:
            raise StatusUnavailable


def page_routes(source: StatusSource) -> dict[str, Route]:
    routes: dict[str, Route] = {"/status.json": ("application/json", source.json)}
    for path, (name, kind) in _FILES.items():
        content = (_PAGE / name).read_bytes()
        routes[path] = (kind, lambda content=content: content)  # type: ignore[misc]
    return routes


def metrics_routes(source: StatusSource) -> dict[str, Route]:
    from elasticgang.watch import metrics

    return {"/metrics": (metrics.CONTENT_TYPE, metrics.exposition(source.status))}


class ReadOnlyServer(HTTPServer):
    """Serves `routes` on `listener`. `hosts`: the names that a request may use for it; None for any (SERVER-4)."""

    def __init__(self, listener: socket.socket, routes: Mapping[str, Route]) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.routes = routes
        host = listener.getsockname()[0]
        is_loopback = ipaddress.ip_address(host).is_loopback
        self.hosts = _LOOPBACK | {f"[{host}]" if ":" in host else host} if is_loopback else None
        self._deadlines: dict[Any, float] = {}  # by connection
        self._threads = ThreadPoolExecutor(MAX_CLIENTS)  # a thread for each connection would cost three times as much

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._deadlines) >= MAX_CLIENTS:  # SERVER-3
            self.shutdown_request(request)
            return
        self._deadlines[request] = time.monotonic() + CONNECTION_S
        try:
            self._threads.submit(self._serve, request, client_address)
        except BaseException:  # no thread can be started; one that runs may get the connection all the same
            self._deadlines.pop(request, None)
            raise

    def _serve(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except Exception:
            self.handle_error(request, client_address)
        finally:
            self.shutdown_request(request)
            self._deadlines.pop(request, None)

    def server_close(self) -> None:
        super().server_close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def service_actions(self) -> None:
        """SERVER-3. `serve_forever` calls this after each connection, and twice a second."""
        now = time.monotonic()
        for request, deadline in list(self._deadlines.items()):
            if deadline < now:
                with contextlib.suppress(OSError):  # it has ended
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away, or sends nothing, is no error of ours."""


class _Handler(BaseHTTPRequestHandler):
    server: ReadOnlyServer
    server_version, sys_version = "elasticgang", ""
    timeout = _CLIENT_TIMEOUT_S

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def _answer(self, *, has_body: bool) -> None:
        host, _, port = (self.headers.get("Host") or "").rpartition(":")
        name = host if port.isdecimal() else f"{host}:{port}".lstrip(":")
        if self.server.hosts is not None and name.lower() not in self.server.hosts:
            self.send_error(HTTPStatus.FORBIDDEN, "use the address that the agent has printed")  # SERVER-4
            return
        route = self.server.routes.get(self.path.partition("?")[0])
        if route is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            kind, content = route[0], route[1]()
        except StatusUnavailable:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "the job's files cannot be read")
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if has_body:
            self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        if code == HTTPStatus.NOT_IMPLEMENTED:  # another method: SERVER-2
            code, message = HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD"
            length = self.headers.get("Content-Length", "0")
            self.rfile.read(min(int(length) if length.isdecimal() else 0, _MAX_BODY_BYTES))  # else it sees a reset
        super().send_error(code, message, explain)

    def end_headers(self) -> None:
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if self.command not in ("GET", "HEAD"):
            self.send_header("Allow", "GET, HEAD")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def main(log_dir: str, options: str) -> None:
    """`options`: JSON, see `serving.serve`; "listeners": the descriptors of listening sockets by what they serve."""
    ignore_stop_signals()  # SERVER-1
    given = json.loads(options)
    traces, add_scalars = _traces() if given["traces"] else None, _scalars(given["scalars"])
    give_way(_NICENESS, given["session_niceness"])  # once all is imported: beside busy sessions that takes long then
    reader = JobReader(
        Path(log_dir, EVENTS),
        lambda: True,
        lambda text: None,
        (lambda event: None) if traces is None else traces.add,
        given["offset"],
    )
    source = StatusSource(reader, add_scalars)
    for what, fd in given["listeners"].items():
        routes = page_routes(source) if what == "page" else metrics_routes(source)
        server = ReadOnlyServer(socket.socket(fileno=fd), routes)
        threading.Thread(target=server.serve_forever, name=what, daemon=True).start()
    ended = threading.Event()
    refreshing = threading.Thread(target=_refresh, args=(source, ended), name="refresh", daemon=True)
    refreshing.start()
    sys.stdin.buffer.read()
    ended.set()
    refreshing.join(_LAST_READ_S)
    if traces is not None:
        traces.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an exporter that hangs does not keep it


def _traces() -> Traces | None:
    from elasticgang.watch import traces

    traces.show_first_failure()
    try:
        return traces.Traces(traces.make_exporter(os.environ))
    except OperationalError as exc:
        print(f"elasticgang: warning: no traces: {exc}", file=sys.stderr)
        return None


def _scalars(directory: str | None) -> Callable[[dict[str, Any]], None]:
    if directory is None:
        return lambda status: None
    from elasticgang.watch.scalars import ScalarWriter

    return ScalarWriter(Path(directory)).add


def _refresh(source: StatusSource, ended: threading.Event) -> None:
    while not ended.wait(_READ_S):
        source.refresh()
    source.refresh()


if __name__ == "__main__":
    main(*sys.argv[1:])
