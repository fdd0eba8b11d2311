"""Opens the ports of a job's page and metrics, and runs the process that serves them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping

from elasticgang.errors import OperationalError
from elasticgang.process.own_modules import command_of
from elasticgang.process.priority import session_niceness

_END_S = 4.0  # longer than it takes to read the last events and to export the last spans


def listen(host: str, port: int, option: str) -> socket.socket:
    """Raises OperationalError: the address cannot be used. `option`: names it in the message."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as exc:
        number = exc.errno if isinstance(exc, OSError) else None
        reason = os.strerror(number) if number and number > 0 else str(exc)
        raise OperationalError(f"{option}: cannot listen on {host}:{port}: {reason}") from exc


def check_metrics(option: str) -> None:
    """Raises OperationalError: the package for metrics is missing."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise OperationalError(f"{option} needs prometheus_client: pip install 'elasticgang[metrics]'")


def check_tensorboard(directory: str, option: str) -> None:
    """Raises OperationalError: the package for scalars is missing, or `directory` cannot be written."""
    if importlib.util.find_spec("tensorboard") is None:
        raise OperationalError(f"{option} needs tensorboard: pip install 'elasticgang[tensorboard]'")
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as exc:
        raise OperationalError(f"{option}: cannot write to {directory}: {exc.strerror}") from exc
    if not os.access(directory, os.W_OK | os.X_OK):
        raise OperationalError(f"{option}: cannot write to {directory}")


def wants_traces(environ: Mapping[str, str]) -> bool:
    """Whether OpenTelemetry's variables select an exporter of traces."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    names = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    return any(environ.get(name) for name in names)


def check_traces() -> None:
    """Raises OperationalError: the package for traces is missing."""
    if importlib.util.find_spec("opentelemetry") is None or importlib.util.find_spec("opentelemetry.sdk") is None:
        raise OperationalError("traces need OpenTelemetry's SDK: pip install 'elasticgang[otel]'")


@contextlib.contextmanager
def serve(
    listeners: Mapping[str, socket.socket],
    log_dir: str,
    *,
    traces: bool = False,
    scalars: str | None = None,
    offset: int = 0,
) -> Iterator[None]:
    """Serve what happens to the job with its events in `log_dir`. `listeners`: "page", "metrics"; they are closed.
    `traces`: export them too. `scalars`: the directory to write TensorBoard's to. `offset`: the bytes of the event file
    that are of earlier jobs."""
    if not (listeners or traces or scalars):
        yield
        return
    fds = {what: listener.fileno() for what, listener in listeners.items()}
    for fd in fds.values():
        os.set_blocking(fd, True)
    options = {"listeners": fds, "traces": traces, "scalars": scalars, "offset": offset}
    options["session_niceness"] = session_niceness()
    command = command_of("elasticgang.watch.server", log_dir, json.dumps(options))
    files = tuple(fds.values())
    process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=files, start_new_session=True)  # PRIORITY-LAST
    for listener in listeners.values():
        listener.close()
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()  # SERVER-1
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        finally:
            process.kill()
            process.wait()
