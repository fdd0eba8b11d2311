"""The registered training state of one rank: its snapshot, the server for healing peers, and the healer.

"Small" state is what forward changes (buffers and registered objects); "large" state is parameters and optimizer state.

SNAPSHOT-1  The served state belongs to exactly one attempt: live large state between two applies, and a copy of the
    small state from the beginning of the step (RULE-6). A learner runs no forward. It therefore also fetches the small
    state after the step's forward, and loads it together with the step's apply.
SNAPSHOT-2  An apply waits for the readers, up to `EXCLUSIVE_TIMEOUT_S`, then closes their connections. It never
    overlaps a read.
SNAPSHOT-3  A healer changes its own state only after all of it has arrived and every chunk's digest is right.
SNAPSHOT-4  Received data is never unpickled.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elasticgang.errors import OperationalError, WireError
from elasticgang.protocol.commit import Attempt
from elasticgang.state import striped_fetch, transport
from elasticgang.state.dtensor import like, local, locally
from elasticgang.state.serialization import flatten, unflatten
from elasticgang.testing import reached

log = logging.getLogger("elasticgang")

EXCLUSIVE_TIMEOUT_S = 10.0
READY_TIMEOUT_S = 10.0
_ACCEPT_RETRY_S = 0.1
BY_RANGE_FROM_BYTES = 16 << 20  # a smaller state comes faster from one source than from several

_T = TypeVar("_T")


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


def _placed(state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """An optimizer's state, with DTensors for parameters that are DTensors."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    placed = {
        index: {key: like(value, parameters[index]) for key, value in of_parameter.items()}
        for index, of_parameter in state["state"].items()
        if isinstance(index, int)
    }
    return {**state, "state": {**state["state"], **placed}}


@dataclass(eq=False)
class _Reader:
    sock: socket.socket


class SnapshotServer:
    """The state of one rank, and the server from which its peers heal."""

    def __init__(self, host: str | None = None) -> None:
        """`host`: the address to serve on; None serves nobody."""
        self._modules: dict[str, nn.Module] = {}
        self._parameters: dict[str, dict[str, nn.Parameter]] = {}
        self._optimizers: dict[str, Stateful] = {}
        self._others: dict[str, Stateful] = {}
        self._snapshot: dict[str, Any] = {}
        self._changed = threading.Condition()
        self._serving: Attempt | None = None
        self._forward_done = False
        self._readers: set[_Reader] = set()
        self._digests = striped_fetch.Digests()
        self._received: striped_fetch.ReceivedChunks | None = None  # of an unfinished heal
        self._listener: socket.socket | None = None
        self._closed = threading.Event()
        self.address = ""
        if host is not None:
            self._listener = socket.create_server((host, 0))
            self.address = f"{host}:{self._listener.getsockname()[1]}"
            threading.Thread(target=self._accept, name="state-server", daemon=True).start()

    def register(self, **objects: object) -> None:
        for name, item in objects.items():
            if name in self._modules or name in self._optimizers or name in self._others:
                raise ValueError(f"a state named {name!r} is registered already")
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
                raise TypeError(f"{name} ({type(item).__name__}) must have state_dict() and load_state_dict()")
            if isinstance(item, nn.Module):
                self._modules[name] = item
                self._parameters[name] = dict(item.named_parameters())
            elif hasattr(item, "param_groups"):
                self._optimizers[name] = item
            else:
                flatten(item.state_dict())  # raises now and not when a peer heals
                self._others[name] = item

    def unregister(self, names: Sequence[str]) -> None:
        """Forget the objects of these names. Call it inside `exclusive`."""
        for name in names:
            for objects in (self._modules, self._parameters, self._optimizers, self._others):
                objects.pop(name, None)
        self._snapshot = self._small(cloned=True)

    # -- steps

    def begin(self, attempt: Attempt | None) -> None:
        if attempt is not None:
            self._forget_received()
        self._snapshot = self._small(cloned=True)  # also without state: this rank's may be designated (RECOVERY-3)
        for name, module in self._modules.items():
            if not any(isinstance(parameter, DTensor) for parameter in self._parameters[name].values()):
                self._parameters[name] = dict(module.named_parameters())  # FSDP replaces them while it is gathered
        with self._changed:
            self._serving, self._forward_done = attempt, False
            self._changed.notify_all()

    def forward_done(self) -> None:
        with self._changed:
            self._forward_done = True
            self._changed.notify_all()

    def restore(self) -> None:
        self._load_small(self._snapshot)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """SNAPSHOT-2: no peer reads inside this context. Raises OperationalError: a reader does not end after its
        connection was closed. The state must not be changed."""
        deadline = time.monotonic() + EXCLUSIVE_TIMEOUT_S
        with self._changed:
            self._serving = None
            self._changed.notify_all()
            while self._readers and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            for reader in self._readers:
                transport.shut(reader.sock)
            # A reader whose connection is closed ends at its next byte.
            if not self._changed.wait_for(lambda: not self._readers, EXCLUSIVE_TIMEOUT_S):
                raise OperationalError(
                    f"a healer still reads the state {EXCLUSIVE_TIMEOUT_S:g} s after its connection was closed"
                )
        self._digests.forget()
        yield

    def close(self) -> None:
        self._forget_received()
        with self._changed:
            self._serving = None
            self._changed.notify_all()
        self._closed.set()
        if self._listener is not None:
            transport.shut(self._listener)
            self._listener.close()

    def _forget_received(self) -> None:
        if self._received is not None:
            self._received.close()
            self._received = None

    def _small(self, *, cloned: bool) -> dict[str, Any]:
        """The small state: buffers and registered objects, which forward and the code around it change."""
        buffers = {
            name: {key: buffer.detach().clone() if cloned else buffer for key, buffer in module.named_buffers()}
            for name, module in self._modules.items()
        }
        others = {name: item.state_dict() for name, item in self._others.items()}
        return {"buffers": buffers, "others": copy.deepcopy(others) if cloned else others}

    def _load_small(self, small: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, buffers in small["buffers"].items():
                present = dict(self._modules[name].named_buffers())
                for key, value in buffers.items():
                    present[key].copy_(value)
        for name, state in small["others"].items():
            self._others[name].load_state_dict(copy.deepcopy(state))

    def _large(self) -> dict[str, Any]:
        parameters = {
            name: {key: local(parameter) for key, parameter in of_module.items()}
            for name, of_module in self._parameters.items()
        }
        optimizers = {name: locally(optimizer.state_dict()) for name, optimizer in self._optimizers.items()}
        return {"parameters": parameters, "optimizers": optimizers}

    def _load_large(self, large: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameters in large["parameters"].items():
                present = self._parameters[name]
                for key, value in parameters.items():
                    local(present[key]).copy_(value)
        for name, state in large["optimizers"].items():
            optimizer = self._optimizers[name]
            optimizer.load_state_dict(_placed(state, optimizer))

    # -- serving

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._closed.is_set():
            with contextlib.ExitStack() as failed:
                try:
                    sock, _ = self._listener.accept()
                    failed.enter_context(sock)
                    transport.at_once(sock)
                    threading.Thread(target=self._serve, args=(sock,), name="state-reader", daemon=True).start()
                    failed.pop_all()
                except (OSError, RuntimeError) as exc:  # the healer has gone, or no descriptor or thread is left
                    log.debug("could not serve a healer: %r", exc)
                    self._closed.wait(_ACCEPT_RETRY_S)

    def _serve(self, sock: socket.socket) -> None:
        reader = _Reader(sock)
        with sock:
            sock.settimeout(transport.HEAL_TIMEOUT_S)
            try:
                request = json.loads(transport.receive(sock, 1 << 16))
                attempt = Attempt(*request["attempt"])
                refusal = self._admit(reader, attempt, request["after"])
                if refusal is not None:
                    transport.send(sock, json.dumps({"refused": refusal}).encode())
                    return
                reached("serving")
                if request.get("by_range"):
                    striped_fetch.serve(sock, attempt, self._snapshot, self._large(), self._digests)
                else:
                    self._send_state(sock, request["after"])
            except (OSError, WireError, ValueError, KeyError, TypeError, RecursionError) as exc:
                log.debug("dropped a healer: %r", exc)
            finally:
                with self._changed:
                    self._readers.discard(reader)
                    self._changed.notify_all()

    def _admit(self, reader: _Reader, attempt: Attempt, after: bool) -> str | None:
        """Wait until this rank's step on `attempt` has begun and, with `after`, until its forward is done. From then on
        no apply runs while `reader` reads (SNAPSHOT-1, SNAPSHOT-2). Returns why it may not read, or None."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._serving == attempt, READY_TIMEOUT_S):
                return f"it serves {_in_words(self._serving)}, not {_in_words(attempt)}"
            if after:
                reached("forward_awaited")
                ended = self._changed.wait_for(
                    lambda: self._serving != attempt or self._forward_done, transport.FORWARD_TIMEOUT_S
                )
                if self._serving != attempt:
                    return f"its step on {_in_words(attempt)} ended, and it serves {_in_words(self._serving)} now"
                if not ended:
                    limit = transport.FORWARD_TIMEOUT_S
                    return f"the forward of its step on {_in_words(attempt)} did not end within {limit:g} s"
            self._readers.add(reader)
            return None

    def _send_state(self, sock: socket.socket, after: bool) -> None:
        state: dict[str, Any] = (
            {"small": self._small(cloned=False)} if after else {"small": self._snapshot, "large": self._large()}
        )
        spec, tensors = flatten(state)
        transport.send(sock, json.dumps({"spec": spec, "tensors": transport.shapes_of(tensors)}).encode())
        for tensor in tensors:
            for chunk in transport.chunks(tensor):
                sock.sendall(transport.digest(chunk))
                sock.sendall(chunk)

    # -- healing

    def heal(self, sources: Sequence[str], attempt: Attempt, cancelled: Callable[[], bool] = lambda: False) -> bool:
        def load(state: dict[str, Any]) -> bool:  # SNAPSHOT-3: called with the complete state
            self._load_small(state["small"])
            self._load_large(state["large"])
            self._digests.forget()
            self._snapshot = self._small(cloned=True)  # the step that this rank heals in may be dropped
            return True

        if self._num_bytes() >= BY_RANGE_FROM_BYTES:
            if self._received is None:
                self._received = striped_fetch.ReceivedChunks()
            state = striped_fetch.StripedFetch(sources, attempt, cancelled, self._received).run()
            if state is None:
                return False
            self._received = None
            return self._loaded(load, state)
        return self._from_first(sources, attempt, False, cancelled, load) is True

    @property
    def num_received(self) -> int:
        """Chunks that an unfinished heal has received."""
        return 0 if self._received is None else self._received.num_received

    def _num_bytes(self) -> int:
        """The size of the local parameters."""
        return sum(local(each).nbytes for of_module in self._parameters.values() for each in of_module.values())

    @staticmethod
    def _loaded(load: Callable[[dict[str, Any]], bool], state: dict[str, Any]) -> bool:
        try:
            return load(state)
        except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as exc:
            log.warning("could not load the state: %s", exc)
            return False

    def fetch_after(
        self, sources: Sequence[str], attempt: Attempt, cancelled: Callable[[], bool] = lambda: False
    ) -> Callable[[], None] | None:
        def later(state: dict[str, Any]) -> Callable[[], None]:
            small = state["small"]
            return lambda: self._load_small(small)

        return self._from_first(sources, attempt, True, cancelled, later)

    @staticmethod
    def _from_first(
        sources: Sequence[str],
        attempt: Attempt,
        after: bool,
        cancelled: Callable[[], bool],
        use: Callable[[dict[str, Any]], _T],
    ) -> _T | None:
        for source in sources:
            if cancelled():
                return None
            try:
                return use(_fetch(source, attempt, after, cancelled))
            except (OSError, WireError, ValueError, KeyError, TypeError, IndexError, RuntimeError) as exc:
                log.warning("could not heal from %s: %s", source, exc)
        return None


def _in_words(attempt: Attempt | None) -> str:
    return "no state" if attempt is None else f"the state after step {attempt.step} of generation {attempt.generation}"


def _fetch(source: str, attempt: Attempt, after: bool, cancelled: Callable[[], bool]) -> dict[str, Any]:
    with transport.connect(source) as sock:
        transport.send(sock, json.dumps({"attempt": list(attempt), "after": after}).encode())
        transport.await_answer(sock, cancelled, transport.HEAL_TIMEOUT_S + after * transport.FORWARD_TIMEOUT_S)
        manifest = json.loads(transport.receive(sock, transport.MAX_MANIFEST_BYTES))
        if "refused" in manifest:
            raise WireError(manifest["refused"])
        tensors = [_receive_tensor(sock, shape, dtype) for shape, dtype in manifest["tensors"]]
    state: dict[str, Any] = unflatten(manifest["spec"], tensors)  # SNAPSHOT-4
    return state


def _receive_tensor(sock: socket.socket, shape: list[int], dtype: str) -> Tensor:
    tensor = transport.empty(shape, dtype)
    for chunk in transport.chunks(tensor):
        expected = bytearray(transport.DIGEST_BYTES)
        transport.receive_into(sock, memoryview(expected))
        transport.receive_into(sock, chunk)
        if transport.digest(chunk) != bytes(expected):
            raise WireError(f"the digest of a chunk of a tensor {shape} is wrong")
    reached("tensor_received")
    return tensor
