"""Gathers the facts about this host that `verdicts.py` judges. Every probe has a deadline and leaves nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

from elasticgang.doctor.verdicts import MEMFD_BYTES, Coordinator, Cuda, Disk, Facts, Limits, Torch
from elasticgang.environment import is_own_directory, run_dir
from elasticgang.errors import reason_of
from elasticgang.process.own_modules import command_of
from elasticgang.session.addresses import probe

_TORCH_FACTS = "elasticgang.doctor.torch_facts"
_TORCH_TIMEOUT_S = 120.0
_LOOPBACK_TIMEOUT_S = 5.0
_LOOKUP_TIMEOUT_S = 10.0
DISK_TIMEOUT_S = 30.0
_BLOCK = bytes(1 << 16)

_T = TypeVar("_T")


def gather(
    *, port: int, checkpoints: Path | str | None = None, coordinator: tuple[str, int] | None = None, timeout_s: float
) -> Facts:
    """`port`: the coordinator's default. `checkpoints`: a directory, or a URL, which is not tried. `coordinator`: host
    and port of one, to which to connect within `timeout_s`. Takes seconds, for the import of torch."""
    host_name = socket.gethostname()
    return Facts(
        python=sys.version_info[:2],
        torch=_torch(),
        torchft=_package_version("torchft"),
        has_nvidia=any(map(os.path.exists, ("/proc/driver/nvidia/version", "/dev/nvidiactl"))),
        pidfd_error=_pidfd_error(),
        memfd_error=_memfd_error(),
        shm=disk(Path("/dev/shm")),
        files=_limits(resource.RLIMIT_NOFILE),
        processes=_processes(),
        container_processes=_container_processes(),
        loopback_error=_loopback_error(),
        port=port,
        port_error=_port_error(port),
        num_ports=_num_ports(),
        host_name=host_name,
        lookup_s=_lookup_s(host_name),
        resolution_s=time.get_clock_info("monotonic").resolution,
        clock=_read("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        py_spy=shutil.which("py-spy"),
        temporary=disk(Path(os.environ.get("TMPDIR") or "/tmp")),
        run_dir=disk(run_dir(), makes_it=True, is_private=True),
        checkpoints=disk(checkpoints, makes_it=True) if isinstance(checkpoints, Path) else checkpoints,
        coordinator=None if coordinator is None else _coordinator(*coordinator, timeout_s),
    )


def _torch() -> Torch:
    command = command_of(_TORCH_FACTS)
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TORCH_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return Torch("", False, None, f"no answer within {_TORCH_TIMEOUT_S:g} s")
    except OSError as exc:  # no process or descriptor is left
        return Torch("", False, None, f"no process can be started for it: {reason_of(exc)}")
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return Torch("", False, None, last[0])
    found = json.loads(done.stdout.splitlines()[-1])
    cuda = found["cuda"]
    if cuda is not None:
        versions = {name: cuda[name] and tuple(cuda[name]) for name in ("driver", "built", "nccl", "nccl_pin")}
        no_peers = [(int(one), int(other)) for one, other in cuda["no_peers"]]
        cuda = Cuda(cuda["num_devices"], **versions, compute_modes=cuda["compute_modes"], no_peers=no_peers)
    return Torch(found["version"], found["has_gloo"], cuda)


def _package_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _pidfd_error() -> str:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as exc:
        return reason_of(exc)
    return ""


def _memfd_error() -> str:
    try:
        fd = os.memfd_create("elasticgang-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as exc:
        return reason_of(exc)
    try:
        for _ in range(MEMFD_BYTES // len(_BLOCK)):
            os.write(fd, _BLOCK)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as exc:
        return reason_of(exc)
    finally:
        os.close(fd)
    return ""


def disk(path: Path, *, makes_it: bool = False, is_private: bool = False) -> Disk:
    """`makes_it`: a job makes the directory, so that the nearest one above it counts where it is missing. `is_private`:
    a job uses it only if nobody else can write to it."""
    return _within(
        DISK_TIMEOUT_S, lambda: _write(path, makes_it, is_private), lambda reason: Disk(str(path), 0, reason)
    )


def _write(path: Path, makes_it: bool, is_private: bool) -> Disk:
    """Writes a small file there, to the disk."""
    try:
        if is_private and os.path.lexists(path) and not is_own_directory(path):
            return Disk(str(path), 0, "it is no directory that only this user can write to")
        path = _existing(path) if makes_it else path
        found = os.statvfs(path)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(_BLOCK)
            file.flush()
            os.fsync(file.fileno())
    except OSError as exc:
        return Disk(str(path), 0, reason_of(exc))
    return Disk(str(path), found.f_bavail * found.f_frsize)


def _existing(path: Path) -> Path:
    return next((each for each in (path.absolute(), *path.absolute().parents) if each.exists()), path)


def _limits(which: int) -> Limits:
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(which))
    return Limits(soft, hard)


def _processes() -> Limits:
    """The limit of this user, whose every thread counts. It does not bind root."""
    limits = _limits(resource.RLIMIT_NPROC)
    is_root = os.geteuid() == 0
    return Limits(None, None) if is_root else dataclasses.replace(limits, used=_num_own_threads())


def _num_own_threads() -> int:
    number = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):  # it has exited
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            if int(fields["Uid"].split()[0]) == os.getuid():
                number += int(fields["Threads"])
    return number


def _container_processes() -> Limits:
    """The limit of this process's control group, as a container sees it."""
    for folder in ("/sys/fs/cgroup", "/sys/fs/cgroup/pids"):
        limit, used = _read(f"{folder}/pids.max"), _read(f"{folder}/pids.current")
        if limit is not None and limit.isdecimal() and used is not None:
            return Limits(int(limit), int(limit), int(used))
    return Limits(None, None)


def _loopback_error() -> str:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
            with socket.create_connection(address, _LOOPBACK_TIMEOUT_S):
                return ""
    except OSError as exc:
        return reason_of(exc)


def _port_error(port: int) -> str:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as exc:
        return reason_of(exc)
    return ""


def _num_ports() -> int | None:
    text = _read("/proc/sys/net/ipv4/ip_local_port_range")
    if text is None:
        return None
    low, high = map(int, text.split())
    return high - low + 1


def _lookup_s(name: str) -> float | None:
    began_s = time.monotonic()

    def look_up() -> float | None:
        with contextlib.suppress(OSError, UnicodeError):
            socket.getaddrinfo(name, None)
            return time.monotonic() - began_s
        return None

    return _within(_LOOKUP_TIMEOUT_S, look_up, lambda reason: None)


def _within(timeout_s: float, probe: Callable[[], _T], failed: Callable[[str], _T]) -> _T:
    """What `probe` returns, or what `failed` makes of the reason why it returns nothing. A resolver and a disk cannot
    be interrupted: a thread waits for them, which the end of the process does not wait for."""
    found: list[_T] = []
    thread = threading.Thread(target=lambda: found.append(probe()), name="probe", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # `processes` reports it too
        return failed("no thread can be started to try it")
    thread.join(timeout_s)
    return found[0] if found else failed(f"no answer within {timeout_s:g} s")


def _coordinator(host: str, port: int, timeout_s: float) -> Coordinator:
    address, began_s = f"{host}:{port}", time.monotonic()

    def connect() -> Coordinator:
        try:
            probe(host, port, timeout_s)
        except (OSError, UnicodeError) as exc:
            reason = reason_of(exc) if isinstance(exc, OSError) else "it is not a valid host name"
            return Coordinator(address, 0.0, reason)
        return Coordinator(address, time.monotonic() - began_s)

    within_s = _LOOKUP_TIMEOUT_S + timeout_s
    return _within(within_s, connect, lambda reason: Coordinator(address, 0.0, reason))


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
