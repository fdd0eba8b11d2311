"""A rank's connection to its agent.

L1  One thread reads; what it learns goes to a queue (records) or to two callbacks that only mark and kill, and wait for
    nothing.
L2  When the agent is gone the rank has nobody to speak for it: the thread ends the rank's whole process group.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elasticgang.errors import WireError
from elasticgang.quorum import wire
from elasticgang.quorum.decide import Record
from elasticgang.quorum.drain import Drain


@dataclass(frozen=True)
class RankContext:
    """What an agent gives to a rank process that it starts. `store` is the coordinator's address; `host` is how peers
    reach this host; `process_group` names what carries the data. `link`, `forks`, `page` and `lease` are descriptors:
    to the agent, to its fork server, of what the agent watches, and of the host's lease; `drain` knows whether it is to
    go."""

    member: str
    local_rank: int
    num_ranks: int
    job: str
    store: str
    host: str
    collective_timeout: float
    process_group: str
    link: int
    forks: int
    page: int
    lease: int
    drain: Drain


_context: RankContext | None = None


def inherit(context: RankContext) -> None:
    """Called once, before the user's script runs."""
    global _context
    _context = context


def inherited() -> RankContext | None:
    """The context that an agent gave to this process; None in a process that no agent started, and in forked children
    of a rank (a DataLoader worker is no rank)."""
    return _context


def disinherit() -> None:
    global _context
    _context = None


class AgentLink:
    """Messages to and from the agent. `tell` is thread-safe."""

    def __init__(self, fd: int, *, on_abort: Callable[[int, str], None], on_join: Callable[[int], None]) -> None:
        self._sock = socket.socket(fileno=fd)
        self._lock = threading.Lock()
        self._on_abort, self._on_join = on_abort, on_join
        self.records: queue.SimpleQueue[Record | None] = queue.SimpleQueue()  # None only wakes who waits
        self.is_over = False  # the job, without this rank
        self._thread = threading.Thread(target=self._read, name="agent-link", daemon=True)
        self._thread.start()

    def tell(self, kind: str, **fields: Any) -> None:
        """Send one message. A lost agent is noticed by the reading thread, not here."""
        data = wire.pack(kind, **fields)
        with self._lock:
            try:
                self._sock.sendall(data)
            except OSError:
                return

    def _read(self) -> None:
        try:
            while (message := wire.receive(self._sock)) is not None:
                match message["kind"]:
                    case "record":
                        self.records.put(Record.from_text(message["text"]))
                    case "over":
                        self.is_over = True
                        self.records.put(None)
                    case "abort":
                        self._on_abort(message["generation"], message["reason"])
                    case "join":
                        self._on_join(message["generation"])
        except (OSError, WireError):
            pass
        except Exception:
            traceback.print_exc()  # the process ends here, so that this is all that tells why
        finally:
            os.killpg(0, signal.SIGKILL)
