"""Ranks with a state that others heal from, and sources that fail, for tests."""

from __future__ import annotations

import contextlib
import copy
import socket
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from elasticgang.protocol.commit import Attempt
from elasticgang.session.credentials import Credentials
from elasticgang.session.secret import Secret
from elasticgang.state.authentication import Authenticator
from elasticgang.state.snapshot_server import MAX_REQUEST_BYTES, SnapshotServer
from elasticgang.state.transport import Channel, receive_body, shut

DEADLINE_S = 20.0
HERE = "127.0.0.1"
AT = Attempt(3, 2)
JOB = "job"
CREDENTIALS = Credentials(Secret(b"0123456789abcdef"))
AUTHENTICATOR = Authenticator(JOB, CREDENTIALS)


class Counter:
    """Some object of the user's."""

    def __init__(self, count: int = 0) -> None:
        self.state: dict[str, Any] = {"count": count, "seen": [1, 2], ("nested"): {"pair": (1, None)}}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Rank:
    """A snapshot server with a model, an optimizer with state, and an object."""

    def __init__(
        self, seed: int, host: str | None = HERE, size: int = 4, credentials: Credentials = CREDENTIALS
    ) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, size), nn.BatchNorm1d(size))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.1 * (seed + 1))
        self.counter = Counter(seed)
        for _ in range(seed):
            self.train()
        self.server = SnapshotServer(host, JOB, credentials)
        self.server.register(model=self.model, optim=self.optim, counter=self.counter)

    def train(self) -> None:
        self.model(torch.randn(5, 3)).sum().backward()
        self.optim.step()
        self.optim.zero_grad()

    def large(self) -> Any:
        return [p.detach().clone() for p in self.model.parameters()], self.optim.state_dict()["state"]

    def small(self) -> Any:
        return [b.clone() for b in self.model.buffers()], copy.deepcopy(self.counter.state)


Ranks = Callable[..., Rank]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


class Background:
    """A call in a thread; `result` waits for it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._outcome: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._outcome.append(function()))
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(DEADLINE_S)
        assert not self.running, "it hangs"
        return self._outcome[0]


class FakeSource:
    """Answers one healer by `serve`, which is given the authenticated connection once the request was read."""

    def __init__(self, serve: Callable[[Channel], None]) -> None:
        self._listener = socket.create_server((HERE, 0))
        self.address = f"{HERE}:{self._listener.getsockname()[1]}"
        self.request: dict[str, Any] = {}
        self._serve = serve
        self._background = Background(self._run)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            with AUTHENTICATOR.accept(sock) as channel:
                self.request = channel.receive(MAX_REQUEST_BYTES)
                self._serve(channel)

    def __enter__(self) -> FakeSource:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._background.result()


class Relay:
    """A wire between one healer and a source. `change` gets all that the source sends after its handshake, once it has
    closed the connection, and returns what the healer gets."""

    def __init__(self, source: Rank, change: Callable[[bytes], bytes]) -> None:
        self._to, self._change = source.server.address, change
        self._listener = socket.create_server((HERE, 0))
        self.address = f"{HERE}:{self._listener.getsockname()[1]}"
        self.from_healer = b""
        self._background = Background(self._run)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            healer, _ = self._listener.accept()
            with healer, connected(self._to) as source:
                forwarding = Background(lambda: self._forward(healer, source))
                pass_handshake(source, healer)
                whole = b"".join(iter(lambda: source.recv(1 << 16), b""))
                healer.sendall(self._change(whole))
                for sock in (healer, source):
                    shut(sock)
                forwarding.result()

    def _forward(self, healer: socket.socket, source: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := healer.recv(1000):
                self.from_healer += data
                source.sendall(data)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *error: object) -> None:
        shut(self._listener)
        self._listener.close()
        self._background.result()


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE_S)


def pass_handshake(source: socket.socket, healer: socket.socket) -> None:
    """The source's challenge and its proof."""
    for _ in range(2):
        pass_frame(source, healer, 1024)


def pass_frame(source: socket.socket, healer: socket.socket, limit: int) -> None:
    body = receive_body(source, limit)
    healer.sendall(len(body).to_bytes(4, "big") + body)
