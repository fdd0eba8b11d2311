"""A coordinator of its own command ends on signals, after the agents that are signalled too."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticgang.protocol.coordinator_messages import Heartbeat, Hello
from elasticgang.protocol.job_facts import AgentFacts
from elasticgang.protocol.stop_request import REPEATED_S
from elasticgang.session.handshake import AGENT
from tests.chaos.attacked import JOB_ID, Session
from tests.chaos.several import Coordinator
from tests.support import PROMPT_S, wait_until


@contextlib.contextmanager
def session(coordinator: Coordinator, *, is_stopping: bool, number: int = 1) -> Iterator[Session]:
    """Of an agent that is in no record. The coordinator has handled what it told."""
    opened = Session(coordinator.port, b"", AGENT, JOB_ID)
    with contextlib.closing(opened.sock):
        opened.send(Hello("a", "incarnation", number))
        assert b"Welcome" in opened.receive()
        opened.send(AgentFacts(is_stopping=is_stopping))
        opened.send(Heartbeat(1))
        while b"HeartbeatAnswer" not in opened.receive():
            pass
        yield opened


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    with Coordinator(tmp_path) as started:
        assert started.port
        yield started


def waits(coordinator: Coordinator) -> bool:
    return "ends after them" in coordinator.stderr


# SERVE-LEAVE
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_it_ends_once_no_agent_that_is_stopping_has_a_session(coordinator: Coordinator, number: signal.Signals) -> None:
    with session(coordinator, is_stopping=True) as agent:
        coordinator.process.send_signal(number)
        wait_until(lambda: waits(coordinator), "a line")
        coordinator.process.send_signal(signal.SIGTERM)  # REPEAT-1
        agent.send(Heartbeat(2))
        while b"HeartbeatAnswer" not in agent.receive():
            pass
        assert coordinator.process.poll() is None
    assert coordinator.wait(PROMPT_S) == 0
    assert coordinator.stderr.count("ends after them") == 1


# SERVE-LEAVE
def test_it_waits_a_moment_for_agents_that_are_signalled_later(coordinator: Coordinator) -> None:
    with session(coordinator, is_stopping=False) as agent:
        began_s = time.monotonic()
        coordinator.process.send_signal(signal.SIGTERM)
        agent.send(AgentFacts(is_stopping=True))
        wait_until(lambda: waits(coordinator), "a line")
        agent.send(AgentFacts(is_stopping=False))
        assert coordinator.wait(PROMPT_S) == 0
        assert time.monotonic() - began_s >= REPEATED_S


# SERVE-LEAVE
def test_agents_that_train_on_do_not_keep_it(coordinator: Coordinator) -> None:
    with session(coordinator, is_stopping=False):
        coordinator.process.send_signal(signal.SIGTERM)
        assert coordinator.wait(PROMPT_S) == 0
    assert not waits(coordinator)


# SERVE-LEAVE
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_another_signal_ends_it_at_once(coordinator: Coordinator, number: signal.Signals) -> None:
    with session(coordinator, is_stopping=True):
        coordinator.process.send_signal(signal.SIGTERM)
        wait_until(lambda: waits(coordinator), "a line")
        if number == signal.SIGTERM:
            time.sleep(REPEATED_S)
        coordinator.process.send_signal(number)
        assert coordinator.wait(PROMPT_S) == 0


# SERVE-LEAVE
def test_it_outlives_a_session_that_an_agent_which_is_stopping_opens_again(coordinator: Coordinator) -> None:
    with session(coordinator, is_stopping=True):
        coordinator.process.send_signal(signal.SIGTERM)
        wait_until(lambda: waits(coordinator), "a line")
        time.sleep(REPEATED_S)  # not only because of those that are signalled later
    with session(coordinator, is_stopping=True, number=2) as agent:
        agent.send(Heartbeat(2))
        while b"HeartbeatAnswer" not in agent.receive():
            pass
        time.sleep(REPEATED_S)
        assert coordinator.process.poll() is None
    assert coordinator.wait(PROMPT_S) == 0
    assert coordinator.stderr.count("ends after them") == 1


def test_without_sessions_it_ends(coordinator: Coordinator) -> None:
    coordinator.process.send_signal(signal.SIGTERM)
    assert coordinator.wait(PROMPT_S) == 0
