"""What the agent learns of its devices over NVML, by a stand-in for it, and the real package without a driver."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticgang.agent.gpu_monitor import MAX_ERRORS, GpuMonitor
from tests.integration import fake_nvml
from tests.support import wait_until


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml)
    monkeypatch.setenv("FAKE_NVML", str(tmp_path))
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def start(state: Path) -> Iterator[Callable[..., GpuMonitor]]:
    """Starts a monitor of the given devices, which ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(*devices: int) -> GpuMonitor:
            before = set(threading.enumerate())
            monitor = GpuMonitor(devices)
            monitor.start()
            stack.callback(_end, monitor, set(threading.enumerate()) - before)
            return monitor

        yield start


def _end(monitor: GpuMonitor, threads: set[threading.Thread]) -> None:
    monitor.stop()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def wait_ready(state: Path) -> None:
    wait_until((state / "waits").exists, "the monitor waits for errors")


def put(path: Path, text: object) -> None:
    """Whole at once."""
    path.with_suffix(".new").write_text(str(text))
    os.replace(path.with_suffix(".new"), path)


def test_errors_of_a_device_are_taken_once(state: Path, start: Callable[..., GpuMonitor]) -> None:
    monitor = start(0, 1)
    wait_ready(state)
    assert monitor.take_errors(0) == monitor.take_errors(1) == ""
    put(state / "xid-1", 79)
    assert wait_until(lambda: monitor.take_errors(1), "the Xid is read") == "Xid 79"
    assert monitor.take_errors(0) == monitor.take_errors(1) == ""


def test_a_lost_device_does_not_hide_the_errors_of_the_others(state: Path, start: Callable[..., GpuMonitor]) -> None:
    monitor = start(0, 1)
    wait_ready(state)
    (state / "lost-0").touch()
    put(state / "xid-1", 74)
    assert wait_until(lambda: monitor.take_errors(1), "the Xid is read") == "Xid 74"


def test_of_many_errors_that_nobody_takes_the_last_ones_stay(state: Path, start: Callable[..., GpuMonitor]) -> None:
    monitor = start(0, 1)
    wait_ready(state)
    for number in range(MAX_ERRORS + 3):
        put(state / "xid-1", number)
        wait_until(lambda: not (state / "xid-1").exists(), "the Xid is read")
    put(state / "xid-0", 79)
    wait_until(lambda: monitor.take_errors(0), "those before it are kept")
    assert monitor.take_errors(1) == ", ".join(f"Xid {number}" for number in range(3, MAX_ERRORS + 3))


def test_only_new_ecc_errors_count(state: Path, start: Callable[..., GpuMonitor]) -> None:
    put(state / "ecc-1", 5)
    monitor = start(0, 1)
    wait_ready(state)
    put(state / "ecc-1", 6)
    assert wait_until(lambda: monitor.take_errors(1), "the error is read") == "1 uncorrectable ECC error"
    put(state / "ecc-1", 8)
    assert wait_until(lambda: monitor.take_errors(1), "the errors are read") == "2 uncorrectable ECC errors"


def test_users_of_a_device(state: Path, start: Callable[..., GpuMonitor]) -> None:
    monitor = start(0, 1)
    wait_ready(state)
    assert monitor.users(0) == set()
    put(state / "users-1", "7 8")
    assert (monitor.users(0), monitor.users(1), monitor.users(2)) == (set(), {7, 8}, None)


def test_a_device_is_found_by_its_uuid(
    state: Path, start: Callable[..., GpuMonitor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bb")
    put(state / "users-1", "7")
    monitor = start(0)
    wait_ready(state)
    assert monitor.users(0) == {7}


@pytest.mark.parametrize("module", [fake_nvml, None], ids=["no driver", "no package"])
def test_without_a_driver_or_the_package_nothing_is_known(
    module: object, state: Path, start: Callable[..., GpuMonitor], monkeypatch: pytest.MonkeyPatch
) -> None:
    (state / "no-driver").touch()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monitor = start(0, 1)
    assert (monitor.users(0), monitor.take_errors(0)) == (None, "")


def test_unknown_devices_need_no_thread(start: Callable[..., GpuMonitor]) -> None:
    before = set(threading.enumerate())  # of which those that other tests have left may end
    monitor = start()
    assert set(threading.enumerate()) <= before
    assert monitor.users(0) is None


def test_the_real_package_has_what_the_stand_in_has(
    start: Callable[..., GpuMonitor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "pynvml")
    pynvml = pytest.importorskip("pynvml")
    used = {name for name in vars(fake_nvml) if name.lower().startswith("nvml")}
    assert len(used) > 12
    assert {name for name in used if not hasattr(pynvml, name)} == set()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        monitor = start(0)
        assert (monitor.users(0), monitor.take_errors(0)) == (None, "")
