"""docker/compose.yaml and docker/Dockerfile have the form that an engine needs. `tests/chaos` runs them, without the
GPUs, where there is an engine.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from elasticgang.launch.arguments import make_parser
from tests.documents import REPOSITORY

COMPOSE: dict[str, Any] = yaml.safe_load((REPOSITORY / "docker" / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (REPOSITORY / "docker" / "Dockerfile").read_text()
KEYS = {
    *("build", "command", "depends_on", "deploy", "dns_opt", "environment", "image", "networks", "profiles", "restart"),
    *("shm_size", "stop_grace_period", "ulimits", "volumes"),
}
VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}")


def instructions(name: str) -> list[str]:
    text = DOCKERFILE.replace("\\\n", " ")
    return [line.removeprefix(f"{name} ").strip() for line in text.splitlines() if line.startswith(f"{name} ")]


def with_defaults(text: str) -> str:
    return VARIABLE.sub(lambda match: match[2] or "", text)


def test_without_a_profile_a_coordinator_and_three_agents_start() -> None:
    assert {name for name, service in SERVICES.items() if "profiles" not in service} == {
        *("coordinator", "agent-1", "agent-2", "agent-3")
    }
    assert SERVICES["gpu"]["profiles"] == ["gpu"]


def test_the_gpu_profile_reserves_devices() -> None:
    (device,) = SERVICES["gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    others = [service for name, service in SERVICES.items() if name != "gpu"]
    assert not any("deploy" in service for service in others)
    assert SERVICES["gpu"]["shm_size"] == "8gb"
    assert SERVICES["gpu"]["image"] != SERVICES["coordinator"]["image"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_names_what_there_is(name: str) -> None:
    service = SERVICES[name]
    assert set(service) <= KEYS
    assert set(service["networks"]) <= set(COMPOSE["networks"])
    assert {volume.split(":")[0] for volume in service["volumes"] if not volume.startswith("${")} <= set(
        COMPOSE["volumes"]
    )
    assert set(service.get("depends_on", ())) <= set(SERVICES)
    make_parser().parse_args(with_defaults(service["command"]).split())


@pytest.mark.parametrize("name", [name for name, service in SERVICES.items() if "build" in service])
def test_a_build_gives_arguments_that_the_dockerfile_takes(name: str) -> None:
    build = SERVICES[name]["build"]
    docker = REPOSITORY / "docker"
    assert (docker / build["context"] / build["dockerfile"]).resolve() == docker / "Dockerfile"
    taken = {argument.partition("=")[0] for argument in instructions("ARG")}
    assert set(build["args"]) == taken
    index = with_defaults(build["args"]["TORCH_INDEX"])
    assert index == f"https://download.pytorch.org/whl/{'cu130' if name == 'gpu' else 'cpu'}"


def test_the_image_asks_for_the_driver_but_for_no_device() -> None:
    variables = dict(line.split("=", 1) for line in instructions("ENV"))
    assert {"compute", "utility"} <= set(variables["NVIDIA_DRIVER_CAPABILITIES"].split(","))
    assert "NVIDIA_VISIBLE_DEVICES" not in variables


def test_the_image_copies_what_there_is_and_installs_with_the_constraints() -> None:
    sources = [source for line in instructions("COPY") for source in line.split()[:-1]]
    assert sources
    assert [source for source in sources if not (REPOSITORY / source).exists()] == []
    installs = [line for line in instructions("RUN") if "-r requirements.txt" in line]
    assert len(installs) == 1
    assert "-c constraints.txt" in installs[0]
    assert "${TORCH_INDEX}" in installs[0]
