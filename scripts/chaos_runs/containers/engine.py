"""A container engine by its command line: an image, and a project of docker/compose.yaml."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
DOCKERFILE = REPOSITORY / "docker" / "Dockerfile"
COMPOSE_FILE = REPOSITORY / "docker" / "compose.yaml"
BUILD_ARGS = ("TORCH_INDEX", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_TRUSTED_HOST")

_COMMAND_S = 120.0
_BUILD_S = 3600.0
_ENDING_S = 10.0


class NotHereError(Exception):
    """What is needed is not on this machine; the message says what."""


class EngineError(Exception):
    """A command of the engine failed."""


def docker(*arguments: str, timeout_s: float = _COMMAND_S) -> bytes:
    """What it wrote to stdout. Raises EngineError."""
    return _run(["docker", *arguments], timeout_s)


def _run(command: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None) -> bytes:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, env=env)
    except subprocess.TimeoutExpired as exc:
        raise EngineError(f"`{' '.join(command[:4])} ...` did not end within {timeout_s:g} s") from exc
    if done.returncode:
        told = done.stderr.decode(errors="replace").strip()[-2000:]
        raise EngineError(f"`{' '.join(command[:4])} ...` failed (exit code {done.returncode}): {told}")
    return done.stdout


def find_compose() -> list[str]:
    """The beginning of a compose command. Raises NotHereError: no engine answers, or there is no compose."""
    if shutil.which("docker") is None:
        raise NotHereError("there is no `docker` command here")
    try:
        docker("info", timeout_s=20.0)
    except EngineError as exc:
        raise NotHereError(f"no container engine answers: {exc}") from exc
    try:
        docker("compose", "version")
    except EngineError:
        if shutil.which("docker-compose") is None:
            raise NotHereError("there is neither `docker compose` nor `docker-compose` here") from None
        return ["docker-compose"]
    return ["docker", "compose"]


def build(tag: str, base_image: str, network: str | None) -> None:
    """Raises NotHereError: there is no such base image, nor a registry that has it; EngineError."""
    try:
        docker("image", "inspect", base_image)
    except EngineError:
        try:
            docker("pull", "--quiet", base_image, timeout_s=_BUILD_S)
        except EngineError as exc:
            raise NotHereError(
                f"the base image {base_image} cannot be had (docker/make-base makes one): {exc}"
            ) from exc
    options = ["--build-arg", f"BASE_IMAGE={base_image}"]
    for name in BUILD_ARGS:
        if name in os.environ:
            options += ["--build-arg", name]
    if network is not None:
        options += ["--network", network]
    docker(
        "build", "--force-rm", "--tag", tag, "--file", str(DOCKERFILE), *options, str(REPOSITORY), timeout_s=_BUILD_S
    )


class Project:
    """The services of the compose file, under a name of their own."""

    def __init__(self, compose: Sequence[str], name: str, env: Mapping[str, str]) -> None:
        self.name = name
        self._env = {**os.environ, **env}
        self._command = [*compose, "--project-name", name, "--file", str(COMPOSE_FILE)]
        self._containers: dict[str, str] = {}

    @property
    def network(self) -> str:
        return f"{self.name}_job"

    def up(self) -> None:
        self._compose("up", "--detach", "--no-build")

    def down(self) -> None:
        """Nothing of it is left: containers, network and volumes."""
        self._compose("down", "--volumes", "--remove-orphans", "--timeout", "3")

    def container(self, service: str) -> str:
        if service not in self._containers:
            found = self._compose("ps", "--all", "--quiet", service).decode().split()  # all: it may have ended
            if not found:
                raise EngineError(f"there is no container of {service}")
            self._containers[service] = found[0]
        return self._containers[service]

    def logs(self) -> str:
        return self._compose("logs", "--no-color", "--tail", "15").decode(errors="replace")

    def state(self, service: str) -> dict[str, object]:
        """As the engine has it: "Running", "ExitCode", ..."""
        found: dict[str, object] = json.loads(docker("inspect", "--format", "{{json .State}}", self.container(service)))
        return found

    def health(self, service: str) -> str:
        return docker("inspect", "--format", "{{.State.Health.Status}}", self.container(service)).decode().strip()

    def files(self, service: str) -> dict[str, bytes]:
        """What it has in /job, by path. It may be writing, may have ended, and may end just now."""
        container = self.container(service)
        state = self.state(service)
        if state["Running"] and not state["Paused"]:
            try:  # the engine's own copy of a file that grows is cut short; tar reads on to where it was
                return _unpack(docker("exec", container, "sh", "-c", "tar -C /job -c . || [ $? = 1 ]"))
            except EngineError:
                if not self._ends(service):
                    raise
        return _unpack(docker("cp", f"{container}:/job/.", "-"))

    def _ends(self, service: str) -> bool:
        """Whether it has ended, or does now."""
        deadline = time.monotonic() + _ENDING_S
        while self.state(service)["Running"]:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def _compose(self, *arguments: str) -> bytes:
        return _run([*self._command, *arguments], 2 * _COMMAND_S, self._env)


def _unpack(archive: bytes) -> dict[str, bytes]:
    found = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for entry in tar:
            file = tar.extractfile(entry) if entry.isfile() else None
            if file is not None:
                found[os.path.normpath(entry.name)] = file.read()
    return found
