"""A torch store for the rendezvous keys of process groups, over a connection to the rank's agent.

The agent pushes the keys of every group that this process has joined: `get` and `wait` wait for the pushed keys and
send no request. Of a group of more than `ask_size` ranks, the process asks for the keys that it needs (KEYS-ASKED). The
store has only the operations that the rendezvous of process groups uses; all others raise.

AGENT-STORE-1  A wait ends at its deadline, when the connection is lost, or when the agent reports that the generation
    is over.
AGENT-STORE-2  With its own key a rank asks for those to which it connects first: otherwise each round of its first
    collective would wait for an answer of the coordinator.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import socket
import threading
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from torch._C._distributed_c10d import Store

from elasticgang.collectives.exchange import rounds
from elasticgang.errors import WireError
from elasticgang.process import framing
from elasticgang.torch_private import gloo_keys

_MAX_NAME_CHARS = 64


class AgentStoreClient:
    """One connection to the agent. Any number of threads may use its stores."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._send_lock = threading.Lock()
        self._changed = threading.Condition()
        self._keys: dict[tuple[str, str], dict[str, bytes]] = defaultdict(dict)  # by prefix and group
        self._prefix = ""  # of the newest generation; keys of earlier ones are dropped
        self._over = ""
        self._is_lost = False
        self._reader = threading.Thread(target=self._read, name="agent-store", daemon=True)
        self._reader.start()

    def store(self, prefix: str, group: str, timeout: timedelta, peers: Peers | None = None) -> AgentStore:
        """The store of one group of the generation with that prefix. `peers`: ask for keys."""
        if len(group) > _MAX_NAME_CHARS:  # the name of a made group contains all of its ranks
            group = hashlib.sha256(group.encode()).hexdigest()
        with self._changed:
            if prefix != self._prefix:
                self._prefix, self._keys = prefix, defaultdict(dict)
        return AgentStore(self, prefix, group, timeout, peers)

    def put(self, prefix: str, group: str, name: str, value: bytes, asked: Sequence[str] | None = None) -> None:
        """Put a key, and join the group, or ask for the keys `asked`. Raises RuntimeError: the connection is lost."""
        with self._changed:
            self._keys[prefix, group][name] = value
        self._send(prefix, group, [(group, name, base64.b64encode(value).decode())], asked)

    def join(self, prefix: str, group: str) -> None:
        """Ask the agent for the keys of the group. Raises RuntimeError: the connection is lost."""
        self._send(prefix, group, [], None)

    def ask(self, prefix: str, group: str, names: Sequence[str]) -> None:
        """Ask the agent for these keys of the group. Raises RuntimeError: the connection is lost."""
        self._send(prefix, group, [], names)

    def close(self) -> None:
        """Close the connection, which ends every wait."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._sock.close()

    def wait(self, prefix: str, group: str, names: Sequence[str], timeout: timedelta) -> list[bytes]:
        """The values of `names`, once all have arrived. Raises RuntimeError (AGENT-STORE-1)."""
        keys = self._keys[prefix, group]

        def is_decided() -> bool:
            return self._is_lost or self._over == prefix or all(name in keys for name in names)

        with self._changed:
            if not self._changed.wait_for(is_decided, timeout.total_seconds()):
                missing = [name for name in names if name not in keys]
                raise RuntimeError(
                    f"wait timeout after {timeout.total_seconds():g} s for the rendezvous keys {missing}"
                )
            if all(name in keys for name in names):
                return [keys[name] for name in names]
        raise RuntimeError("the agent is gone" if self._is_lost else "the generation is over")

    def _send(self, prefix: str, group: str, keys: list[tuple[str, str, str]], asked: Sequence[str] | None) -> None:
        """`asked`: None joins the group."""
        groups, asked_of = ([group], []) if asked is None else ([], [(group, asked)])
        data = framing.pack("keys", prefix=prefix, groups=groups, keys=keys, asked=asked_of)
        with self._send_lock:
            try:
                self._sock.sendall(data)
            except OSError as exc:
                raise RuntimeError(f"the agent is gone: {exc}") from exc

    def _read(self) -> None:
        try:
            while (message := framing.receive(self._sock)) is not None:
                with self._changed:
                    if message["kind"] == "over":
                        self._over = message["prefix"]
                    elif message["prefix"] == self._prefix:
                        for group, name, value in message["keys"]:
                            self._keys[self._prefix, group][name] = base64.b64decode(value)
                    self._changed.notify_all()
        except (OSError, WireError):
            pass
        with self._changed:
            self._is_lost = True
            self._changed.notify_all()


class Peers(NamedTuple):
    """A rank of a group that connects when it is used, and asks for the keys of those to which it connects."""

    rank: int
    size: int

    def first(self) -> list[int]:
        """Those to which it connects in a ring, and by recursive doubling. Others are asked for when they are used."""
        ring = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        return sorted({*ring, *(each.peer for each in rounds(self.rank, self.size))} - {self.rank})


class AgentStore(Store):
    """The keys of one group."""

    def __init__(
        self, client: AgentStoreClient, prefix: str, group: str, timeout: timedelta, peers: Peers | None
    ) -> None:
        super().__init__()
        self._client, self._prefix, self._group, self._timeout, self._peers = client, prefix, group, timeout, peers
        self._has_joined = False
        self._asked: set[str] = set()

    def set(self, key: str, value: Any) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        asked = None if self._peers is None else gloo_keys(key, self._peers.rank, self._peers.first())
        self._client.put(self._prefix, self._group, key, data, asked)
        self._has_joined = True
        self._asked.update(asked or ())

    def get(self, key: str) -> bytes:
        return self._values([key], None)[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._values(keys, timeout)

    def _values(self, keys: Sequence[str], timeout: timedelta | None) -> list[bytes]:
        if self._peers is not None:
            new = [key for key in keys if key not in self._asked]
            if new:
                self._client.ask(self._prefix, self._group, new)
                self._asked.update(new)  # again, if another thread asks at the same time
        elif not self._has_joined:
            self._client.join(self._prefix, self._group)
            self._has_joined = True
        return self._client.wait(self._prefix, self._group, keys, timeout or self._timeout)
