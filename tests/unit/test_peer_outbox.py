"""What agents tell each other, on its way through the coordinator."""

from __future__ import annotations

from elasticgang.coordinator.peer_outbox import PeerOutbox
from elasticgang.protocol.batches import MAX_SENT_CHARS
from elasticgang.protocol.coordinator_messages import Broadcast, PeerMessage, PeerMessages


def told(agent: str, data: str = "data") -> PeerMessage:
    return PeerMessage("topic", data, agent)


# SERVE-PEERS
def test_what_several_agents_tell_goes_to_all_in_one_message() -> None:
    plans: list[None] = []
    outbox = PeerOutbox(lambda: plans.append(None))
    for agent, source in (("a", 1), ("b", 2), ("a", 1)):
        outbox.add(Broadcast(told(agent), source))
    assert len(plans) == 1
    assert outbox.take() == ([PeerMessages((told("a"), told("b"), told("a")))], None)
    assert outbox.take() == ([], None)
    outbox.add(Broadcast(told("a"), 1))
    outbox.add(Broadcast(told("a", "more"), 1))
    assert len(plans) == 2
    assert outbox.take() == ([PeerMessages((told("a"), told("a", "more")))], 1)


# SERVE-PEERS
def test_messages_have_a_bounded_size() -> None:
    outbox = PeerOutbox(lambda: None)
    data = ["x" * (MAX_SENT_CHARS // 2), "y" * (MAX_SENT_CHARS // 2), "z", "long" * MAX_SENT_CHARS, "w"]
    for each in data:
        outbox.add(Broadcast(told("a", each), 1))
    messages, _ = outbox.take()
    assert [[each.data for each in message.messages] for message in messages] == [
        data[:2],
        [data[2]],
        [data[3]],
        [data[4]],
    ]
