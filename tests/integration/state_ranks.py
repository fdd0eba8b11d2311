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

from elasticgang.errors import WireError
from elasticgang.protocol.commit import Attempt
from elasticgang.session.credentials import Credentials
from elasticgang.session.secret import Secret
from elasticgang.state.authentication import Authenticator
from elasticgang.state.snapshot_server import MAX_REQUEST_BYTES, SnapshotServer
from elasticgang.state.transport import MAX_MANIFEST_BYTES, Channel, receive_body, receive_into, shut

DEADLINE_S = 20.0
HERE = "127.0.0.1"
AT = Attempt(3, 2)
FIRST = Attempt(0, 2)  # before the first committed step (HEALER-4)
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
        self.progress: list[tuple[int, int]] = []  # bytes received, of how many
        self.server = SnapshotServer(host, JOB, credentials, lambda *shown: self.progress.append(shown))
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


class Wire:
    """Between one healer and a source. After the source's manifest, the wire is cut after so many bytes, flips a bit of
    one (counted from the end if negative, of `num_bytes`), or changes the first bytes by `forge`."""

    def __init__(
        self,
        source: Rank,
        *,
        cut: int | None = None,
        flip: int | None = None,
        forge: tuple[int, Callable[[bytes], bytes]] | None = None,
    ) -> None:
        self._to = source.server.address
        self._cut, self._flip, self._forge = cut, flip, forge
        self._listener = socket.create_server((HERE, 0))
        self.address = f"{HERE}:{self._listener.getsockname()[1]}"
        self.from_healer = b""
        self.num_bytes = 0
        self.done = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            healer, _ = self._listener.accept()
            with healer, connected(self._to) as source:
                threading.Thread(target=self._forward, args=(healer, source), daemon=True).start()
                with contextlib.suppress(OSError, WireError):
                    pass_handshake(source, healer)
                    pass_frame(source, healer, MAX_MANIFEST_BYTES)
                    self._pass_chunks(source, healer)
                for sock in (healer, source):
                    shut(sock)
        self._listener.close()
        self.done.set()

    def _pass_chunks(self, source: socket.socket, healer: socket.socket) -> None:
        if self._forge is not None:
            length, forge = self._forge
            first = bytearray(length)
            receive_into(source, memoryview(first))
            healer.sendall(forge(bytes(first)))
        while self._cut != 0 and (data := bytearray(source.recv(1000))):
            if self._flip is not None and self.num_bytes <= self._flip < self.num_bytes + len(data):
                data[self._flip - self.num_bytes] ^= 1
            if self._cut is not None:
                del data[self._cut - self.num_bytes :]
            self.num_bytes += len(data)
            healer.sendall(data)
            if self._cut is not None and self.num_bytes >= self._cut:
                break

    def _forward(self, healer: socket.socket, source: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := healer.recv(1000):
                self.from_healer += data
                source.sendall(data)
        shut(source)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *error: object) -> None:
        shut(self._listener)
        self._listener.close()
        assert self.done.wait(DEADLINE_S)


def num_chunk_bytes(source: Rank, attempt: Attempt = AT) -> int:
    """What `source` sends after its manifest."""
    size = source.model[0].out_features
    assert isinstance(size, int)
    with Wire(source) as wire:
        assert Rank(0, None, size=size).server.heal([wire.address], attempt)
    return wire.num_bytes


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
