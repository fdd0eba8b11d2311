"""Messages, events and instructions are values: equal and hashed by their fields, and never to another class's."""

from __future__ import annotations

import itertools
import pickle

from elasticgang.protocol.agent_events import Finished as JobFinished
from elasticgang.protocol.agent_events import KillRanks, StopHelpers
from elasticgang.protocol.coordinator_messages import Finished, Heartbeat, HeartbeatAnswer


def test_values_are_equal_and_hashed_by_their_fields() -> None:
    assert Heartbeat(3) == Heartbeat(3) != Heartbeat(4)
    assert len({Heartbeat(3), Heartbeat(3), Heartbeat(4), HeartbeatAnswer(3, True)}) == 3
    assert pickle.loads(pickle.dumps(Heartbeat(3))) == Heartbeat(3)
    assert repr(Heartbeat(3)) == "Heartbeat(number=3)"


def test_values_of_two_classes_differ() -> None:
    values: list[object] = [Finished(), JobFinished(), KillRanks(()), StopHelpers()]
    assert len(set(values)) == len(values)
    assert all(one != other for one, other in itertools.combinations(values, 2))
