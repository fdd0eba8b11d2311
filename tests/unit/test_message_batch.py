"""Messages that a process group collects and starts together, over a gang that records what it starts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from elasticgang.collectives.collective import Collective
from elasticgang.collectives.work import Work
from elasticgang.gang import FakeGang
from elasticgang.gang.torch_process_group import GangProcessGroup


class Recording(FakeGang):
    def __init__(self) -> None:
        super().__init__("cpu", rank=0, size=3)
        self.started: list[tuple[str, int]] = []

    def _start(self, collective: Collective) -> Work:
        self.started.append((collective.call, len(collective.messages)))
        return super()._start(collective)


@pytest.fixture
def gang() -> Iterator[Recording]:
    gang = Recording()
    yield gang
    gang.close()


@pytest.fixture
def pg(gang: Recording) -> GangProcessGroup:
    pg = gang.as_process_group()
    assert isinstance(pg, GangProcessGroup)
    return pg


# MESSAGES-1
def test_messages_start_together_when_one_is_waited_for(gang: Recording, pg: GangProcessGroup) -> None:
    received, sent = torch.zeros(2, dtype=torch.int16), torch.arange(2, dtype=torch.int16)
    with pg.batched_messages():
        receiving, sending = pg.recv([received], 1, 7), pg.send([sent], 1, 7)
        assert gang.started == []
        assert receiving.wait()
        assert gang.started == [("messages", 2)]
        assert torch.equal(received, sent)
        assert sending.wait()
    assert gang.started == [("messages", 2)]


# MESSAGES-1
def test_messages_start_before_a_computation_another_collective_and_the_end(
    gang: Recording, pg: GangProcessGroup
) -> None:
    with pg.batched_messages() as start:
        pg.send([torch.ones(1)], 1, 0)
        start()
        start()
        assert gang.started == [("send", 0)]
        pg.send([torch.ones(1)], 2, 0)
        dist.all_reduce(torch.ones(1), group=pg)
        assert gang.started[1:] == [("send", 0), ("all_reduce", 0)]
        pg.send([torch.ones(1)], 1, 0)
        pg.send([torch.ones(1)], 2, 0)
    assert gang.started[3:] == [("messages", 2)]
    pg.send([torch.ones(1)], 1, 0)
    assert gang.started[4:] == [("send", 0)]


def test_messages_of_a_step_that_fails_are_not_started(gang: Recording, pg: GangProcessGroup) -> None:
    def fail() -> None:
        with pg.batched_messages():
            pg.send([torch.ones(1)], 1, 0)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gang.started == []


def test_a_batch_of_torch_is_started_together(gang: Recording, pg: GangProcessGroup) -> None:
    received = torch.zeros(3)
    operations = [
        dist.P2POp(dist.irecv, received, group=pg, group_peer=2),
        dist.P2POp(dist.isend, torch.ones(3), group=pg, group_peer=2),
    ]
    with pg.batched_messages():
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    assert received.tolist() == [1, 1, 1]
    assert gang.started == [("messages", 2)]
