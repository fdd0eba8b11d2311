"""Messages that a process group collects, and then starts all at once (TABLE-4).

torch issues the messages of `batch_isend_irecv` one by one on a group that is written in Python.

MESSAGES-1  They start at the latest when one of them is waited for. Whoever collects starts them before it computes: a
    peer may wait for one meanwhile.
"""

from __future__ import annotations

from typing import Any

from torch.futures import Future

from elasticgang.collectives.collective import Collective
from elasticgang.collectives.torch_calls import Call
from elasticgang.collectives.torch_methods import TorchWork
from elasticgang.collectives.work import Work
from elasticgang.gang.base import Gang

SINGLE = ("send", "recv")


class MessageBatch:
    """The messages of one gang. One thread uses it."""

    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        self._present = _Started()

    def add(self, call: Call) -> TorchWork:
        """Collect the sends or receives of `call`."""
        self._present.messages += call.parts
        return TorchWork([_Message(self, self._present) for _ in call.parts], call)

    def start(self) -> None:
        """Start what is collected. Raises as `Gang.start`."""
        started, self._present = self._present, _Started()
        if started.messages:
            started.work = self._gang.start(joined(started.messages))


def joined(messages: list[Collective]) -> Collective:
    """Sends and receives as one collective."""
    if len(messages) == 1:
        return messages[0]
    received = [message for message in messages if message.call == "recv"]
    sent = [message for message in messages if message.call == "send"]
    return Collective(
        "messages",
        tuple(message.outputs[0] for message in received),
        tuple(message.inputs[0] for message in sent),
        timeout_s=messages[0].timeout_s,
        messages=tuple((message.peer, message.tag) for message in (*received, *sent)),
    )


class _Started:
    """Messages that start together. `work`: None before they do."""

    def __init__(self) -> None:
        self.messages: list[Collective] = []
        self.work: Work | None = None


class _Message(Work):
    """One of them. It ends when all do."""

    def __init__(self, batch: MessageBatch, started: _Started) -> None:
        super().__init__()
        self._batch, self._started = batch, started

    def _work(self) -> Work:
        """MESSAGES-1."""
        if self._started.work is None:
            self._batch.start()
        assert self._started.work is not None
        return self._started.work

    def find_reason(self) -> Any:
        return self._work().find_reason()

    def _wait(self, timeout: float | None) -> bool:
        return self._work().wait(timeout)

    def _future(self) -> Future[Any]:
        return self._work().get_future()
