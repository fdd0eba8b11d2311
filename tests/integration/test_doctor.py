"""`elasticgang doctor` on this host, as it is and under conditions that are bad."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elasticgang.doctor import facts
from elasticgang.doctor.verdicts import Disk, Job
from elasticgang.environment import RUN_DIR
from elasticgang.launch.arguments import COORDINATOR_PORT
from tests import support
from tests.support import without_network

DOCTOR = [sys.executable, "-m", "elasticgang", "doctor"]
DEADLINE_S = 200
pytestmark = pytest.mark.timeout(2 * DEADLINE_S + 60)  # each run imports torch, on whatever the machine has left
LIMITED = 'ulimit {} && exec "$0" "$@"'


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment, timeout=DEADLINE_S
    )


def report(command: list[str], **variables: str) -> tuple[int, Mapping[str, Mapping[str, Any]]]:
    """The exit code, and the findings by their check."""
    done = run([*command, "--json"], **variables)
    assert done.stderr == ""
    said = json.loads(done.stdout)
    assert said["exit_code"] == done.returncode
    return done.returncode, {each["check"]: each for each in said["checks"]}


def limited(limit: str) -> list[str]:
    return ["sh", "-c", LIMITED.format(limit), *DOCTOR]


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_DIR, str(tmp_path / "run"))


def test_this_host_can_run_a_job(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        options = ["--nproc-per-node", "2", "--checkpoint-dir", str(tmp_path / "new"), "--coordinator", address]
        code, found = report([*DOCTOR, *options])
    assert code == 0
    fine = ("Python", "torchft", "pidfd", "memfd", "open files", "processes", "loopback", "TMPDIR", "run directory")
    assert {check: found[check]["level"] for check in fine} == dict.fromkeys(fine, "ok")
    assert found["torch"]["text"].startswith("2.")
    assert found["coordinator"]["text"].startswith(address)
    assert found["checkpoints"]["text"].startswith(str(tmp_path))
    assert not (tmp_path / "new").exists()
    assert list(tmp_path.iterdir()) == []  # it leaves nothing


def test_the_report_for_people_has_the_same_levels() -> None:
    done = run([*DOCTOR, "--nproc-per-node", "2"])
    assert done.returncode == 0, done.stdout
    levels = {line.split()[0] for line in done.stdout.splitlines() if not line.lstrip().startswith("mend: ")}
    assert levels <= {"ok", "warning", "n/a"}


def test_too_few_files_that_cannot_be_written_and_a_coordinator_that_refuses_are_errors(tmp_path: Path) -> None:
    """No file, and no memfd, may have a byte: as on a full disk, but for this process alone."""
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{refusing.getsockname()[1]}"
        options = ["--coordinator", address, "--checkpoint-dir", str(tmp_path)]
        code, found = report([*limited("-n 64 && ulimit -f 0"), *options], TMPDIR=str(tmp_path))
    assert code == 1
    assert found["open files"]["level"] == found["coordinator"]["level"] == "error"
    assert found["open files"]["text"].startswith("64; 8 ranks here of 8 need ")
    assert "--ulimit nofile=" in found["open files"]["mend"]
    assert found["coordinator"]["text"] == f"{address}: Connection refused"
    for check, level in (("TMPDIR", "warning"), ("run directory", "warning"), ("checkpoints", "error")):
        assert found[check]["level"] == level, check
        assert found[check]["text"].startswith(f"{tmp_path}: File too large")
    assert found["memfd"]["level"] == "error"


def test_what_a_job_can_do_without_is_a_warning(tmp_path: Path) -> None:
    """Directories, the default port, and open files that only the script lacks."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    options = ["--nproc-per-node", "2", "--checkpoint-dir", "s3://bucket/x"]
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", COORDINATOR_PORT))
            taken.listen()
        except OSError:
            pass  # somebody else has it, which serves as well
        # Not even root can make a file in /proc.
        code, found = report([*limited("-n 64"), *options], TMPDIR="/proc")
    assert code == 0
    for check in ("TMPDIR", "run directory", "default port", "open files"):
        assert found[check]["level"] == "warning", check
    assert found["TMPDIR"]["text"].startswith("/proc: ")
    assert "no directory that only this user can write to; `elasticgang status`" in found["run directory"]["text"]
    assert "Address already in use" in found["default port"]["text"]
    assert found["checkpoints"]["level"] == "n/a"
    assert found["checkpoints"]["text"].startswith("s3://bucket/x is a URL")


def test_a_probe_without_a_thread_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert facts.disk(tmp_path) == Disk(str(tmp_path), 0, "no thread can be started to try it")


def test_a_disk_that_never_answers_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of the network whose server is down."""
    let_go = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda fd: let_go.wait(DEADLINE_S))
    monkeypatch.setattr(facts, "DISK_TIMEOUT_S", 0.2)
    found = facts.disk(tmp_path)
    assert not let_go.is_set()
    let_go.set()
    assert found == Disk(str(tmp_path), 0, "no answer within 0.2 s")


def test_a_loopback_that_is_down_and_a_limit_that_may_be_raised_are_errors() -> None:
    namespace = without_network()
    code, found = report([*namespace, *limited("-S -n 64")])
    assert code == 1
    assert found["open files"]["level"] == "error"
    assert found["open files"]["mend"].startswith("ulimit -n ")
    if not namespace:
        pytest.skip("needs a network namespace of its own")
    assert found["loopback"]["level"] == "error"
    assert "ip link set lo up" in found["loopback"]["mend"]


def test_a_broken_torch_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text('raise ImportError("libtorch_cpu.so: cannot open shared object file")\n')
    code, found = report(DOCTOR, PYTHONPATH=str(tmp_path))
    assert code == 1
    assert "libtorch_cpu.so" in found["torch"]["text"]
    assert found["NCCL"]["level"] == "n/a"


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--coordinator", "nowhere"], "--coordinator must be HOST:PORT"),
        (["--nproc-per-node", "0"], "must be an integer of at least 1"),
    ],
)
def test_wrong_arguments_are_refused(options: list[str], what: str) -> None:
    done = run([*DOCTOR, *options])
    assert done.returncode == 2
    assert what in done.stderr


COUNTING = """
import contextlib, json, os, pathlib, sys, psutil, torch, elasticgang as eg

manager = eg.join(layout=eg.ParallelLayout())
model = eg.DistributedDataParallel(manager, torch.nn.Linear(2, 2))
optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
batches = eg.GlobalBatch(1000, size=8, slot=2, seed=0)
manager.register_state(model=model, optim=optim)
num_steps = 0
for step in manager.steps(20):
    with step:
        slots = batches.slots(step)
        for slot in slots:
            with model.accumulate(last=slot.last):
                model(torch.ones(2, 2)).sum().backward()
        num_steps += optim.step(weight=slots.num_samples)
        if num_steps == 10 and manager.is_leader:  # the others wait for it in the next step
            agent = psutil.Process(os.getppid())
            found = {}
            for each in (agent, *agent.children(recursive=True)):
                with contextlib.suppress(psutil.Error):  # it has just ended
                    found[str(each.pid)] = each.num_fds()
            pathlib.Path(sys.argv[1]).write_text(json.dumps(found))
"""


def test_a_job_opens_no_more_files_than_the_doctor_counts(tmp_path: Path) -> None:
    script, counts = tmp_path / "script.py", tmp_path / "counts.json"
    script.write_text(COUNTING)
    with support.Job(tmp_path, script, str(counts), ranks=3) as job:
        assert job.wait(DEADLINE_S) == 0, job.stderr
    found = json.loads(counts.read_text())
    assert len(found) >= 1 + 2 * 3
    assert 30 < max(found.values()) <= Job(3, 3).num_files - 256  # without those of the script
