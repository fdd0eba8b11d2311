"""Train in containers that are killed, cut off, paused and stopped, and check every promise in what the members wrote.

Builds docker/Dockerfile, starts docker/compose.yaml (a coordinator, and three agents of two ranks each), and then:

  kill       `docker kill` of agent-3: the others commit on; started again, it joins with new members
  cut        `docker network disconnect` of agent-2: it ends its members and is unhealthy, the others commit on
  reconnect  `docker network connect`: it joins with new members, and is healthy
  crash      `docker kill` and `docker start` of the coordinator: it has the job from its volume, no generation ends
  pause      `docker pause` of agent-1 for longer than its lease: the others commit on; then it joins with new members
  stop       `docker stop` of agent-3: its ranks leave in order, it ends well, and no agent is lost

until all three agents end well. Checked from the members' own histories and the agents' events, which each host keeps
on its volume: for each step one attempt, made of the step's samples, each once; one chain of records; final parameters
equal on all members; a host that is cut off or paused commits nothing. However it ends (but by SIGKILL), nothing is
left in the engine but the image named with --image, and the base image that was pulled.

From the environment: BASE_IMAGE (default: python:3.11-slim), and TORCH_INDEX, PIP_INDEX_URL, PIP_EXTRA_INDEX_URL,
PIP_FIND_LINKS and PIP_TRUSTED_HOST as the Dockerfile has them. With podman, DOCKER_HOST names the socket of `podman
system service`; its health checks need systemd. Exit code: 0 when all of it was seen, 1 when not, 3 when this machine
has no engine, compose or base image.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import operator
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from scripts.chaos_runs.containers.engine import EngineError, NotHereError, Project, build, docker, find_compose
from scripts.chaos_runs.containers.host_logs import HostLog, came_back_wrongly, cut_off_wrongly, host_log_of, run_log_of
from scripts.chaos_runs.soaking.checks import failed_checks
from scripts.demo_job.run_log import RunLog, StepAttempt

AGENTS = ("agent-1", "agent-2", "agent-3")
PAUSED, CUT, KILLED = AGENTS
COORDINATOR = "coordinator"
RANKS_PER_AGENT = 2
EXIT_NOT_HERE = 3
EXIT_STOPPED = 128 + signal.SIGTERM  # of `docker stop`

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NUM_STEPS = 600
_SEED = 0
_MODEL = ("--dim", "64", "--layers", "1", "--context", "32")
_STEPS_ON = 5  # that the others commit while one is away
_LIMIT_S = 300.0  # for each thing that is waited for
_LOOK_S = 0.5


class NotSeenError(Exception):
    """What was to happen did not."""


class Story:
    """The job while it runs. `without`: the first generation without a host that was cut off or paused, by its name.
    `expected_samples`: the samples of each step."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.hosts: dict[str, HostLog] = {}
        self.run_log = RunLog()
        self.without: dict[str, int] = {}
        self.expected_samples: list[list[int]] = []
        self._began = time.monotonic()

    def tell(self) -> None:
        self._wait(f"{len(AGENTS) * RANKS_PER_AGENT} ranks train", lambda: self._strength_is(len(AGENTS)))
        module = "scripts.chaos_runs.containers.expected_samples"
        asked = docker("exec", self.project.container(AGENTS[0]), "python3", "-m", module, *train_args())
        self.expected_samples = json.loads(asked)
        self._kill()
        self._cut_off()
        self._crash_the_coordinator()
        self._pause()
        self._stop()
        for name in AGENTS:
            if name != KILLED:  # it was stopped last
                docker("exec", self.project.container(name), "touch", "/job/hurry")
        self._wait("all agents end", lambda: not self._any_runs(), may_end=True)

    def _kill(self) -> None:
        container = self.project.container(KILLED)
        docker("kill", container)
        self._say(f"killed {KILLED}")
        self._others_go_on(KILLED)
        docker("start", container)
        self._wait(f"{KILLED} takes part again", lambda: self._is_back(KILLED))

    def _cut_off(self) -> None:
        container = self.project.container(CUT)
        docker("network", "disconnect", self.project.network, container)
        self._say(f"cut {CUT} off")
        self.without[CUT] = self._others_go_on(CUT)
        self._wait(f"{CUT} has ended its members", lambda: len(self.hosts[CUT].named("fenced")) == 1)
        self._wait(f"{CUT} is unhealthy", lambda: self.project.health(CUT) == "unhealthy")
        docker("network", "connect", self.project.network, container)
        self._say(f"reconnected {CUT}")
        self._wait(f"{CUT} takes part again", lambda: self._is_back(CUT))
        self._wait(f"{CUT} is healthy", lambda: self.project.health(CUT) == "healthy")

    def _crash_the_coordinator(self) -> None:
        container = self.project.container(COORDINATOR)
        generation = self._newest().generation
        met = self._times_met()
        docker("kill", container)
        docker("start", container)  # at once: it has to answer before the leases end
        step = self._newest().step
        self._say(f"killed the {COORDINATOR} and started it again")
        self._wait("all agents are back", lambda: all(map(operator.gt, self._times_met(), met)))
        self._wait("all commit on", lambda: self._newest().step > step + _STEPS_ON)
        if self._newest().generation != generation:
            raise NotSeenError("a generation ended because its coordinator was killed")

    def _pause(self) -> None:
        container = self.project.container(PAUSED)
        docker("pause", container)
        self._say(f"paused {PAUSED}")
        self.without[PAUSED] = self._others_go_on(PAUSED)
        docker("unpause", container)
        self._wait(f"{PAUSED} takes part again", lambda: self._is_back(PAUSED))

    def _stop(self) -> None:
        lost = self._num_lost()
        docker("stop", "--time", "60", self.project.container(KILLED))
        self._say(f"stopped {KILLED}")
        self._others_go_on(KILLED)
        if self._num_lost() != lost:
            raise NotSeenError(f"{KILLED} left in order, and was declared lost")

    def faults(self) -> list[str]:
        """Everything that was not as promised, in sentences."""
        found = [
            f"{name} ended with exit code {code}"
            for name in AGENTS
            if (code := self.project.state(name)["ExitCode"]) != (EXIT_STOPPED if name == KILLED else 0)
        ]
        self._look()
        hosts = self.hosts.values()
        generations = [line for host in hosts for line in host.named("generation")]
        changes = [line for host in hosts for line in host.named("generation_change")]
        found += failed_checks(self.run_log, generations, changes, self.expected_samples, {})
        for name in (KILLED, CUT):
            found += came_back_wrongly(name, self.hosts[name])
        if len(self.hosts[PAUSED].lives) != 2:
            found.append(f"{PAUSED} has had {len(self.hosts[PAUSED].lives)} lives, instead of two")
        for name, without in self.without.items():
            found += cut_off_wrongly(name, self.hosts[name], without)
        return found

    def summary(self, faults: Sequence[str]) -> dict[str, object]:
        generations = {line["generation"] for host in self.hosts.values() for line in host.named("generation")}
        return {
            "passed": not faults,
            "faults": list(faults),
            "steps": 0 if self.run_log.newest is None else self.run_log.newest.step + 1,
            "generations": max(generations, default=0),
            "members": sum(len(life) for host in self.hosts.values() for life in host.lives),
            "seconds": round(time.monotonic() - self._began, 1),
        }

    # -- what is waited for

    def _others_go_on(self, missing: str) -> int:
        """The first generation in which they commit without it."""
        before = self._newest()

        def others() -> Iterator[StepAttempt]:
            return (
                line.attempt
                for line in self.run_log.committed
                if line.attempt.generation > before.generation and line.attempt.step > before.step
            )

        self._wait(
            f"the others commit on without {missing}",
            lambda: self._strength_is(len(AGENTS) - 1) and len(set(others())) >= _STEPS_ON,
        )
        return min(attempt.generation for attempt in others())

    def _is_back(self, name: str) -> bool:
        host = self.hosts[name]
        return len(host.lives) == 2 and self._strength_is(len(AGENTS)) and bool(host.committed(host.lives[1]))

    def _times_met(self) -> list[int]:
        """How often each agent found its coordinator again."""
        return [len(host.named("coordinator reachable")) for host in self.hosts.values()]

    def _num_lost(self) -> int:
        return sum(len(host.named("host lost")) for host in self.hosts.values())

    def _strength_is(self, num_agents: int) -> bool:
        return self.run_log.strength() == num_agents * RANKS_PER_AGENT

    def _newest(self) -> StepAttempt:
        assert self.run_log.newest is not None
        return self.run_log.newest

    def _any_runs(self) -> bool:
        return any(self.project.state(name)["Running"] for name in AGENTS)

    def _look(self) -> None:
        self.hosts = {name: host_log_of(self.project.files(name)) for name in AGENTS}
        self.run_log = run_log_of(self.hosts.values())

    def _wait(self, what: str, seen: Callable[[], bool], *, may_end: bool = False) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while True:
            self._look()
            if seen():
                self._say(what)
                return
            if not may_end and (self.run_log.finished or not self._any_runs()):
                raise NotSeenError(f"the job was done before this was seen: {what}")
            if time.monotonic() > deadline:
                raise NotSeenError(f"not seen within {_LIMIT_S:g} s: {what}")
            time.sleep(_LOOK_S)

    def _say(self, what: str) -> None:
        step = "-" if self.run_log.newest is None else self.run_log.newest.step
        print(f"{time.monotonic() - self._began:6.1f} s, step {step}: {what}", file=sys.stderr, flush=True)


def train_args() -> list[str]:
    return ["--steps", str(_NUM_STEPS), "--seed", str(_SEED), *_MODEL]


def environment(image: str, job: str) -> Mapping[str, str]:
    """For the compose file."""
    return {
        "IMAGE": image,
        "JOB_ID": job,
        "SCRIPTS": str(Path(__file__).resolve().parents[1]),
        "SCRIPT": "chaos_runs/containers/paced.py",
        "SCRIPT_ARGS": " ".join(train_args()),
    }


@contextlib.contextmanager
def running(project: Project) -> Iterator[Story]:
    """On every way out, nothing of the project is left."""
    try:
        with _held_signals():  # else the engine may still make what was asked of it when all has been cleared away
            project.up()
        yield Story(project)
    finally:
        _ignore_signals()
        project.down()


def run(args: argparse.Namespace) -> int:
    compose = find_compose()
    name = f"elasticgang-test-{uuid.uuid4().hex[:8]}"
    with contextlib.ExitStack() as stack:
        image = args.image
        if image is None:
            image = name
            stack.callback(_remove_image, image)
            print("building the image (minutes, the first time)", file=sys.stderr, flush=True)
            build(image, os.environ.get("BASE_IMAGE", "python:3.11-slim"), args.build_network)
        project = Project(compose, name, environment(image, name))
        story = stack.enter_context(running(project))
        try:
            story.tell()
            faults = story.faults()
        except (NotSeenError, EngineError) as error:
            faults = [str(error)]
        found = story.summary(faults)
        if args.output_dir is not None:
            keep(project, args.output_dir)
            (args.output_dir / "summary.json").write_text(json.dumps(found, indent=2) + "\n")
        if faults:
            print(project.logs(), file=sys.stderr)
        print(json.dumps(found, indent=2))
    return int(bool(faults))


def keep(project: Project, directory: Path) -> None:
    for name in AGENTS:
        for path, data in project.files(name).items():
            target = directory / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)


def _remove_image(tag: str) -> None:
    _ignore_signals()
    with contextlib.suppress(EngineError):  # it was never built
        docker("image", "rm", "--force", tag)


@contextlib.contextmanager
def _held_signals() -> Iterator[None]:
    """They come afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ignore_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _on_signal(number: int, _: FrameType | None) -> None:
    _ignore_signals()  # once is enough: what was begun is cleared away
    raise SystemExit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/docker-test",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--image", metavar="NAME", help="use this one, which was built before, and keep it")
    parser.add_argument(
        "--build-network", metavar="NAME", help="the build's, as of `docker build --network` (default: the engine's)"
    )
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="keep what the containers wrote in DIR")
    args = parser.parse_args(argv)
    if args.output_dir is not None:
        args.output_dir.mkdir(parents=True, exist_ok=True)
    for number in _SIGNALS:
        signal.signal(number, _on_signal)
    try:
        return run(args)
    except NotHereError as error:
        print(f"scripts/docker-test: cannot be shown here: {error}", file=sys.stderr)
        return EXIT_NOT_HERE
    except EngineError as error:
        print(f"scripts/docker-test: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
