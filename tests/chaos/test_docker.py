"""docker/: its health check, and the job of its compose file under kills and cuts, where there is an engine.

The job takes the image that ELASTICGANG_IMAGE names; without it, one is built.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from scripts.chaos_runs.containers.host_logs import HostLog, came_back_wrongly, cut_off_wrongly, host_log_of
from tests.support import REPOSITORY, wait_until

HEALTH = REPOSITORY / "docker" / "health.py"
SCRIPT = REPOSITORY / "scripts" / "docker-test"
EXIT_NOT_HERE = 3
BUILD_AND_RUN_S = 1500


@pytest.fixture
def engine() -> None:
    """Skips the test where no engine answers."""
    if shutil.which("docker") is None:
        pytest.skip("needs a container engine: there is no `docker` command")
    answer = subprocess.run(["docker", "info"], capture_output=True, text=True, timeout=60)
    if answer.returncode:
        pytest.skip(f"needs a container engine: {answer.stderr.strip().splitlines()[-1]}")


def docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.timeout(BUILD_AND_RUN_S + 60)
@pytest.mark.usefixtures("engine")
def test_a_job_in_containers_survives_a_kill_and_a_cut(tmp_path: Path) -> None:
    given = ["--image", os.environ["ELASTICGANG_IMAGE"]] if "ELASTICGANG_IMAGE" in os.environ else []
    command = [str(SCRIPT), *given, "--output-dir", str(tmp_path)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=BUILD_AND_RUN_S)
    if done.returncode == EXIT_NOT_HERE:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    summary: dict[str, Any] = json.loads((tmp_path / "summary.json").read_text())
    assert summary["passed"] is True
    assert summary["generations"] >= 8  # start, kill, back, cut, back, pause, back, stop
    assert summary["members"] >= 12
    assert left() == ""


@pytest.mark.usefixtures("engine")
@pytest.mark.skipif("ELASTICGANG_IMAGE" not in os.environ, reason="needs ELASTICGANG_IMAGE, an image built before")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_when_it_is_interrupted_nothing_is_left(number: signal.Signals) -> None:
    """Once while the containers are started, once while they run."""
    command = [str(SCRIPT), "--image", os.environ["ELASTICGANG_IMAGE"]]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            service = "coordinator" if number == signal.SIGINT else "agent-3"
            wait_until(lambda: docker("ps", "--quiet", "--filter", f"name=elasticgang-test-.*{service}"), service)
            process.send_signal(number)
            assert process.wait(90) == 128 + number
        finally:
            process.terminate()
    assert left() == ""


AGENTS_THAT_END = r"""
FROM {image}
ENTRYPOINT ["sh", "-c", "[ \"$1\" != run ] || exec echo nothing to do; exec elasticgang \"$@\"", "sh"]
"""


@pytest.fixture
def image_whose_agents_end() -> Iterator[str]:
    tag = f"elasticgang-test-{uuid.uuid4().hex[:8]}"
    dockerfile = AGENTS_THAT_END.format(image=os.environ["ELASTICGANG_IMAGE"])
    building = ["docker", "build", "--quiet", "--tag", tag, "-"]
    subprocess.run(building, input=dockerfile, check=True, capture_output=True, text=True, timeout=120)
    yield tag
    docker("image", "rm", "--force", tag)
    assert left() == ""


@pytest.mark.usefixtures("engine")
@pytest.mark.skipif("ELASTICGANG_IMAGE" not in os.environ, reason="needs ELASTICGANG_IMAGE, an image built before")
def test_agents_that_end_at_once_are_told(image_whose_agents_end: str) -> None:
    command = [str(SCRIPT), "--image", image_whose_agents_end]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=PIPE, stderr=PIPE, text=True) as process:
        try:
            told, logs = process.communicate(timeout=90)
        finally:
            process.terminate()
    assert process.returncode == 1, logs
    assert json.loads(told)["faults"] == ["the job was done before this was seen: 6 ranks train"]
    assert logs.count("nothing to do") == 3


def left() -> str:
    """What docker-test makes: containers, volumes, networks and images."""
    kinds = (("ps", "--all", "--quiet"), ("volume", "ls", "--quiet"), ("network", "ls", "--quiet"))
    found = [docker(*kind, "--filter", "name=elasticgang-test-") for kind in kinds]
    return "".join([*found, docker("image", "ls", "--quiet", "--filter", "reference=elasticgang-test-*")])


def test_without_an_engine_it_says_so() -> None:
    environment = {**os.environ, "DOCKER_HOST": "unix:///nowhere/docker.sock"}
    done = subprocess.run([str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_NOT_HERE, done.stderr
    assert "cannot be shown here" in done.stderr
    assert done.stdout == ""


# -- the health check


@pytest.fixture
def listener() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def refusing() -> Iterator[str]:
    """A port that is taken, and on which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def health_of(*command: str) -> tuple[int, str]:
    """Of a process with that command line."""
    waiting = [sys.executable, "-c", "input()", "elasticgang", *command]
    with subprocess.Popen(waiting, stdin=subprocess.PIPE) as process:
        try:
            checked = [sys.executable, "-I", "-S", str(HEALTH), str(process.pid)]
            done = subprocess.run(checked, capture_output=True, text=True, timeout=60)
        finally:
            process.kill()
    assert done.stderr == ""
    return done.returncode, done.stdout


def coordinator_at(address: str) -> list[str]:
    host, _, port = address.rpartition(":")
    return ["coordinator", "--host", host, f"--port={port}"]


def test_a_coordinator_is_healthy_while_it_listens(listener: str) -> None:
    assert health_of(*coordinator_at(listener)) == (0, "")


def test_a_coordinator_that_does_not_listen_is_not(refusing: str) -> None:
    code, told = health_of(*coordinator_at(refusing))
    assert code == 1
    assert f"nobody listens on {refusing}" in told


def test_an_agent_is_healthy_while_its_coordinator_s_host_answers(listener: str, refusing: str) -> None:
    for address in (listener, refusing):
        assert health_of("run", "--coordinator", address, "train.py") == (0, "")
    assert health_of("run", "train.py") == (0, "")


def test_an_agent_that_is_cut_off_is_not() -> None:
    code, told = health_of("run", "--coordinator=coordinator.invalid:29400", "train.py", "coordinator")
    assert code == 1
    assert "coordinator.invalid:29400 does not answer" in told


# -- what docker-test finds in what a host wrote


def host(*, lives: Sequence[Sequence[str]], committed: Sequence[tuple[str, int, float]]) -> HostLog:
    """A host that was cut off at 10 s and came back at 20 s. `committed`: (member, generation, at)."""
    events: list[dict[str, Any]] = []
    for number, members in enumerate(lives):
        at = 20.0 * number
        events.append({"event": "started", "t": at})
        events += [{"event": "spawned", "t": at, "member": member} for member in members]
        if number == 0:
            events.append({"event": "fenced", "t": 10.0})
            events += [{"event": "exited", "t": 10.1, "member": member} for member in members]
    files = {"events.jsonl": "".join(json.dumps(event) + "\n" for event in events).encode() + b'{"half'}
    for member in {member for member, _, _ in committed}:
        lines = [
            {"kind": "committed", "step": 0, "generation": generation, "t": at}
            for name, generation, at in committed
            if name == member
        ]
        files[f"history/{member}.jsonl"] = "".join(json.dumps(line) + "\n" for line in lines).encode()
    return host_log_of(files)


GOOD = [("a", 1, 5.0), ("b", 3, 25.0)]


@pytest.mark.parametrize(
    ("lives", "committed", "told"),
    [
        ([["a"], ["b"]], GOOD, []),
        ([["a"], ["b"]], [*GOOD, ("a", 1, 11.0)], ["h committed 1 steps after it should have ended its members"]),
        ([["a"], ["b"]], [*GOOD, ("a", 2, 9.0)], ["h committed 1 steps while it was cut off"]),
        ([["a"], ["b"]], GOOD[:1], ["no member of h committed anything after it came back"]),
        ([["a"], ["a"]], [("a", 1, 5.0)], ["h came back with members that it had before: ['a']"]),
        ([["a"]], GOOD, ["h has had 1 lives, instead of two"]),
    ],
)
def test_a_broken_promise_of_a_cut_off_host_is_found(
    lives: Sequence[Sequence[str]], committed: Sequence[tuple[str, int, float]], told: Sequence[str]
) -> None:
    found = host(lives=lives, committed=committed)
    assert [*came_back_wrongly("h", found), *cut_off_wrongly("h", found, without=2)] == told
