"""Faults at named places of the runtime, for tests of jobs.

    from elasticgang import testing

    testing.fail_at("votes_received")                   # this process gets SIGKILL at that place
    testing.fail_at("chunk_received", raise_an_error)  # or calls a function, on the thread that reaches the place
    with testing.fail_at("serving", raise_an_error):    # until the block ends
        ...

`PLACES` lists every place. An action may raise, kill, stop or wait. The runtime reacts as it does to the same event
without an action. Without actions, a place costs one lookup in an empty dict.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

PLACES = {
    "totals_received": "the gradients are reduced and their total weight is known; this rank has not voted",
    "sum_written": "a rank has written its numbers of a sum (totals, a vote) to its host's block; nobody can read them",
    "sum_published": "the ranks of its host can read them, or they are on their way to other hosts",
    "sum_collected": "the first rank of a host, of several, has the numbers of its host; the other hosts do not",
    "sum_exchanged": "it has the sums of all hosts; the other ranks of its host do not",
    "votes_received": "the votes are received; this rank has not counted them",
    "commit_recorded": "the step is committed and the agent can read this; it is not applied",
    "applied": "the committed step is applied to the state of this rank",
    "abort_noticed": "the agent's notice that a generation ended is received; on the thread that reads from the agent",
    "abort_begun": "the groups of that generation are being ended; on the same thread, which has waited for nothing",
    "states_compared": "one of the sums of a comparison of states is received; nothing follows from it yet",
    "requesting": "the rank has left its generation; its request for the next is not sent",
    "requested": "the request is sent",
    "record_received": "the next record is received; the rank has not acted on it",
    "configuring": "the rank has acted on the record; its groups are not configured",
    "keys_collected": "an agent has rendezvous keys of its ranks; it has not sent them to the coordinator",
    "keys_received": "a coordinator has received rendezvous keys of an agent; it has forwarded none of them",
    "entered": "the rank has entered the generation",
    "healing": "a learner is about to ask its peers for the state",
    "source_agreed": "a learner knows the chunks of the large state at one peer; that peer has sent none",
    "digests_agreed": "a learner knows the digests of the large state, from one peer",
    "chunk_read": "a learner has read a chunk of the large state from a peer's memory; it has not counted it",
    "chunk_received": "a learner has received a chunk of the large state; it is in the memory of its tensor",
    "moving": "the job has taken another layout; a rank is about to fetch its part of the state from those who keep it",
    "piece_sent": "a rank has sent a piece of the state that it keeps from the former layout",
    "healed": "a learner has loaded the state; it is not active",
    "forward_awaited": "a peer waits for the end of its forward before it serves a learner; it holds the server's lock",
    "serving": "a peer is about to send its state to a learner",
    "leaving": "the rank's loop over steps has ended; its agent does not know",
    "checkpoint_copying": "a rank is about to copy its share of a checkpoint; an apply waits for the copy",
    "checkpoint_copied": "a rank's share of a checkpoint is in shared memory; nothing of it is written",
    "checkpoint_io": "the writer of a checkpoint is about to change its directory by a system call, or its store",
}

_actions: dict[str, list[Callable[[], object]]] = {}


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail_at(place: str, action: Callable[[], object] = kill_this_process) -> AbstractContextManager[None]:
    """Call `action` whenever this process reaches `place`. As a context manager, only until the block ends.

    Raises:
        ValueError: there is no such place.
    """
    if place not in PLACES:
        raise ValueError(f"`place` must be one of {', '.join(PLACES)}, but is {place!r} instead.")
    _actions.setdefault(place, []).append(action)
    return _Installed(place, action)


def reached(place: str) -> None:
    """The runtime calls this at each place."""
    for action in _actions.get(place, ()):
        action()


class _Installed(AbstractContextManager[None]):
    def __init__(self, place: str, action: Callable[[], object]) -> None:
        self._place, self._action = place, action

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _actions[self._place].remove(self._action)
